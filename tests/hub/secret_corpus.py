"""Secrets that nobody has, of every shape we know, and the places where a folder can hold one.

All are made here from parts and from random letters of a fixed seed, so that no scanner takes this file for a leak.
"""

import base64
import json
import random
import re
from collections.abc import Callable

from safetensors.numpy import save

DIGITS, HEX = "0123456789", "0123456789abcdef"
SMALL, LARGE = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WORD = SMALL + LARGE + DIGITS
BASE64 = WORD + "+/"
NAME = WORD + "-_"
SIGNS = "!@#$%^&*(-_=+)"


def letters(alphabet: str, count: int) -> str:
    """Random letters, the same ones each time, with a letter and a digit among them."""
    chosen = random.Random(f"{alphabet}{count}").choices(alphabet, k=count)
    chosen[1] = alphabet[-1 if alphabet[-1].isalnum() else 0]
    chosen[2] = next((each for each in alphabet if each.isdigit()), alphabet[0])
    return "".join(chosen)


# How secrets are written: in parts that "·" parts, with random letters for "<WORD 48>", "⏎" for the end of a line, and
# for "{a,b}" each of the words; " ¦ " parts two secrets. First prefixes, by the letters that follow them: as many as
# in real ones, or more.
_PREFIXES = r"""
BASE64 128 = AB·SK
HEX 32 = s·k- KAGGLE_·KEY= KG·AT_ AZURE_OPENAI_·API_KEY= da·pi DD_·API_KEY= f·c- shp·at_ ke·y- S·K FLWS·ECK- li·ve_
HEX 36 = https://a.webhook.off·ice.com/webhookb2/ https://m.acme.com/ho·oks/ sub·scription-key= app·lication_secret=
HEX 35 = li·ve_ te·st_
HEX 40 = WANDB_·API_KEY= sb·p_ pu·l- bk·ua_ s·qu_ sg·p_ e2·b_ shippo_·live_ c·k_ -Dsonar.lo·gin= shippo_·test_
HEX 40 = sgp_·local_
HEX 48 = s·k_ ruby·gems_
abcdefgh0123456789 32 = FLWS·ECK_TEST-
HEX 64 = s-s4·t2ud- s-s4·t2af-
HEX 64 = s·k-or-v1- https://b.s3.amazonaws.com/k?X-Amz-Sig·nature= do·p_v1_ do·o_v1_ signk·ey-prod-
HEX 72 = AT·TA
LARGE+DIGITS 16 = AK·IA AS·IA AB·IA AC·CA
LARGE+DIGITS 26 = AP·I-
LARGE+DIGITS 27 = NR·AK-
LARGE+DIGITS 40 = rp·a_
LARGE+DIGITS 55 = GO·OG1E
NAME 40 = gl·pat- gl·rt- gl·dt- gl·ptt- gl·ft- gl·imt- gl·agent- gl·cbt- gl·soat- gl·oas- sq·0atp- dck·r_pat_ GOC·SPX-
NAME 40 = sb_·secret_ AI·za AQ·VN h·f_oauth_·eyJhbGciOi. h·f_jwt_·eyJhbGciOi CLOUDFLARE_·API_TOKEN= fi·gd_ tg·p_v1_
NAME 32 = NR·II-
NAME 40 = pscale_·tkn_ duffel_·live_
NAME 43 = sha25·6~ duffel_·test_
NAME 64 = tk·-us- y·0_ tf·p_ 1/·/0 HR·KU- nva·pi- fio·-u-
NAME 120 = hv·s. s·k-proj- ya·29. py·pi-AgEIcHlwaS5vcmc hv·b. AT·ATT3
NAME 120 = https://d1.cloudfront.net/x?Expires=1&Sign·ature=
QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L 58 = AGE-SEC·RET-KEY-1
SMALL+DIGITS 32 = p·8e- _gitlab_·session=
SMALL+DIGITS 43 = oy·2
SMALL+DIGITS 64 = cs·k- hc·aik_ na·pi_ rd·me_
SMALL+LARGE 34 = h·f_ api·_org_
WORD 16 = sm_·aat_ sm_·sat_
WORD 20 = LT·AI
WORD 22 = a·k-
WORD 27 = K0·03
WORD 28 = ai·o_
WORD 32 = AK·ID ci·o ico·-
WORD 34 = mytoken_h·f_ tokenIsh·f_
WORD 38 = 4b·1d
WORD 36 = gh·p_ gh·o_ gh·u_ gh·s_ gh·r_ np·m_ //registry.npmjs.org/:_auth·Token=np·m_ nf·p_ pn·u_ db·tc_
WORD 43 = p·a-
WORD 59 = cm·Vmd
WORD 52 = s·k_prod_
WORD 52 = rzp·_live_ sm_·pat_ f·w_ s·k_live_ s·k_test_ r·k_live_ COMET_·API_KEY= es·ecret_ AT·BB tv·ly- wh·sec_ r·8_
WORD 52 = COHERE_·API_KEY= wand·b_v1_ li·n_api_ https://nas.acme.com/x.zip?to·ken= dp.·pt. nt·n_ fl·p_ s·k- pp·lx-
WORD 52 = ll·x- gs·k_ con·sumer_secret= https://maker.ifttt.com/trigger/x/with/k·ey/ https://hook.eu1.ma·ke.com/
WORD 53 = $2·b$12$
WORD 54 = EZ·AK
WORD 100 = bedrock-·api-key-YmVkcm9jay5hbWF6b25hd3MuY29t
WORD 100 = s·k-svcacct- s·k-admin- ji·na_ AK·Cp xa·i- AAAAAAAAAAAAAAAAAAAAAA gl·c_eyJ snt·rys_eyJ EA·A op·s_eyJ
WORD+SIGNS 50 = django-inse·cure-
"""
_OTHERS = r"""
export HF_·TOKEN=h·f_·<SMALL 34> ¦ https://user:h·f_·<WORD 34>·@huggingface.co/org/name ¦ s·k-ant-api03-·<NAME 93>·AA
s·k-ant-·api03-·a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-
s·k-lf-·1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed ¦ pc·sk_·<WORD 6>·_·<WORD 63> ¦ lsv·2_pt_·<HEX 32>·_·<HEX 10>
MISTRAL_·API_KEY: ·<WORD 32> ¦ wandb:⏎  api_·key: ·<HEX 40> ¦ wandb.log·in(key='·<HEX 40>·')
machine api.wandb.ai⏎  login user⏎  pass·word ·<HEX 40> ¦ {"username": "alice", "k·ey": "·<HEX 32>·"}
aws_secret_·access_key = ·<BASE64 40> ¦ export AWS_SECRET_·ACCESS_KEY=·<BASE64 40>
{"SecretAccess·Key": "·<BASE64 40>·"} ¦ aws_session_·token = ·<BASE64 260>
{"type": "service_account", "private_·key": "-----BEGIN PRIV·ATE KEY-----\nMIIE·"}
DefaultEndpointsProtocol=https;AccountName=a;Account·Key=·<BASE64 86>·==
https://a.blob.core.windows.net/c?sv=2024-11-04&sr=c&s·ig=·<WORD 43>·%3D ¦ <WORD 3>·8·Q~·<WORD 34>
Endpoint=sb://a.servicebus.windows.net/;SharedAccess·Key=·<BASE64 43>·= ¦ Fly·V1 fm·2_·<BASE64 100>
<WORD 14>·.atlas·v1.·<NAME 67> ¦ gl·sa_·<WORD 32>·_·<HEX 8> ¦ tsk·ey-auth-·<WORD 17>·-·<WORD 32>
github·_pat_·<WORD 22>·_·<WORD 59> ¦ {"auths": {"ghcr.io": {"au·th": "·YWxpY2U6MjkwdGJXQVVIdEpBZW9BNFlWQ1c="}}}
PM·AK-·<HEX 24>·-·<HEX 34> ¦ pa·t·<WORD 14>·.·<HEX 64> ¦ CCI·PAT_·<WORD 22>·_·<HEX 40>
sec·ret_mykey_·<HEX 32>·.·<WORD 32> ¦ s·k.ey·J·<WORD 60>·.·<WORD 22> ¦ SS·WS 00·<WORD 40>
access_·token$production$·<SMALL+DIGITS 16>·$·<HEX 32> ¦ vercel_·blob_rw_·<WORD 16>·_·<WORD 30>
pa·t-na1-·1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed ¦ m·s-·1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed
bce-v3/AL·TAK-·<WORD 21>·/·<HEX 40> ¦ <WORD 76>·AZ·DO·<WORD 4> ¦ r·e_·<WORD 8>·_·<WORD 24>
xo·xb-·<DIGITS 12>·-·<DIGITS 12>·-·<WORD 24> ¦ xo·xp-·<DIGITS 12>·-·<HEX 32>
xa·pp-1-A0·<LARGE 9>·-·<DIGITS 12>·-·<HEX 64>
https://hooks.sla·ck.com/services/T0·<LARGE 9>·/B0·<LARGE 9>·/·<WORD 24>
https://discord.com/api/web·hooks/·<DIGITS 18>·/·<NAME 68> ¦ M·<WORD 25>·.·<WORD 6>·.·<NAME 38>
<123456789 10>·:·AA·<NAME 33> ¦ S·G.·<NAME 22>·.·<NAME 43> ¦ xkey·sib-·<HEX 64>·-·<WORD 16> ¦ <HEX 32>·-u·s14
-----BEGIN ·{,RSA ,EC ,DSA ,OPENSSH ,ENCRYPTED }·PRIV·ATE KEY-----⏎MIIEvQIBADANBg
-----BEGIN PGP PRIV·ATE KEY BLOCK-----⏎⏎lQdGB ¦ ---- BEGIN SSH2 ENCRYPTED PRIV·ATE KEY ----⏎P2/56wAAAi0AAAA
_au·th=·<BASE64 32> ¦ PuTTY-User-·Key-File-3: ssh-ed25519 ¦ {"kty": "EC", "crv": "P-256", "·d": "·<NAME 43>·"}
ey·JhbGciOiJIUzI1NiJ9.ey·J·<WORD 40>·.·<NAME 43> ¦ https://alice:S3cr·3tPass@nas.acme.com/a.zip
mongodb+srv://alice:c0rr3ct·horse@cluster0.acme.mongodb.net ¦ redis://:h0rseba·ttery@cache.acme.com:6379
{"pass·word": "c0rrect-h0rse"} ¦ Author·ization: Basic ·<BASE64 32> ¦ Author·ization: Bearer ·<NAME 40>
{"client_·secret": "·<NAME 40>·"} ¦ {"kty": "oct", "·k": "·<NAME 43>·"}
curl -u ali·ce:c0rrecth0rse https://nas.acme.com ¦ SECRET_·KEY = '·<WORD 50>·'
A3·-·<LARGE+DIGITS 6>·-·<LARGE+DIGITS 11>·-·<LARGE+DIGITS 5>·-·<LARGE 5>·-·<LARGE+DIGITS 5>
<WORD 6>·_·<WORD 29>·_m·mk
A3·-·<LARGE+DIGITS 6>·-·<LARGE+DIGITS 6>·-·<LARGE 5>·-·<LARGE+DIGITS 5>·-·<LARGE 5>·-·<LARGE+DIGITS 5>
dn·key-·<SMALL+DIGITS 26>·-·<SMALL+DIGITS 52> ¦ sa·t.·<NAME 22>·.·<WORD 24>·.·<WORD 20>
auth·ress_·<SMALL+DIGITS 20>·.·<SMALL+DIGITS 5>·.acc_·<SMALL+DIGITS 20>·.·<WORD 60>
ey·JhbGciOiJSU0EtT0FFUCJ9.·<NAME 342>·.·<NAME 16>·.·<NAME 80>·.·<NAME 22>
ey·JhbGciOiJkaXIifQ..·<NAME 22>·.·<NAME 60>·.·<NAME 43> ¦ secondary·Key: ·<HEX 32>
https://f.azurewebsites.net/api/x?co·de=·<NAME 54>·== ¦ wandb:⏎  k·ey: ·<HEX 40>
sd·k-1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed ¦ t1·.·<NAME 80>·.·<NAME 86>
"""


def shapes() -> dict[str, str]:
    """A text for each kind of secret, with the words that stand before it where it has no form of its own."""
    written = re.split("\n| ¦ ", _OTHERS.strip())
    for line in _PREFIXES.strip().split("\n"):
        letters_after, _, prefixes = line.partition(" = ")
        written += [f"{prefix}·<{letters_after}>" for prefix in prefixes.split()]
    made = {}
    for each in written:
        several = re.search(r"\{((?:[A-Z]* ?,)+[A-Z]* ?)\}", each)
        for word in several[1].split(",") if several else [""]:
            text = each.replace(several[0], word) if several else each
            made[text] = re.sub(r"<(\S+) (\d+)>", _random, text.replace("·", "")).replace("⏎", "\n")
    return made


def _random(found: re.Match[str]) -> str:
    """Random letters of an alphabet, which is named or written out, or of several together."""
    return letters("".join(globals().get(name, name) for name in found[1].split("+")), int(found[2]))


def _escape_some(text: str) -> str:
    """A string of JSON in which every third letter is an escape."""
    every_third = (f"\\u{ord(c):04x}" if place % 3 == 0 or c in '"\\\n' else c for place, c in enumerate(text))
    return f'"{"".join(every_third)}"'


def _through(text: str, write: Callable[[str], str]) -> str:
    """A text with its longest word written in another way."""
    word = max(re.findall(r"[A-Za-z0-9_]+", text), key=len)
    return text.replace(word, write(word), 1)


def _in_the_middle(text: str, between: str) -> str:
    """A text with something in the middle of its longest word."""
    return _through(text, lambda word: word[: len(word) // 2] + between + word[len(word) // 2 :])


def _header(text: str) -> bytes:
    weights = save({}, metadata={"format": "pt", "command": "@"})
    header = weights[8:].replace(b'"@"', _escape_some(text).encode())
    return len(header).to_bytes(8, "little") + header


def _card(content: str | bytes) -> tuple[str, bytes]:
    body = content.encode() if isinstance(content, str) else content
    return "README.md", b"# Mine\n\n" + body + b"\n"


def _cell(text: str) -> tuple[str, bytes]:
    cells = [{"cell_type": "code", "source": text.splitlines(keepends=True)}]
    return "demo.ipynb", json.dumps({"cells": cells}, indent=1).encode()


# The name of a file and its content.
PLACES: dict[str, Callable[[str], tuple[str, bytes]]] = {
    "a card": _card,
    "a card's block": lambda text: _card(f"```yaml\n{text}\n```"),
    "a list in a card": lambda text: _card(f"- `{text}`, of mine"),
    "a string of JSON": lambda text: ("config.json", json.dumps({"deep": [{"note": text}]}, indent=2).encode()),
    "a key of JSON": lambda text: ("eval.json", json.dumps({text: 1}).encode()),
    "escapes of JSON": lambda text: ("tokenizer.json", f'{{"added": {_escape_some(text)}}}'.encode()),
    "JSON in JSON": lambda text: ("training.json", json.dumps({"cells": json.dumps({"source": [text]})}).encode()),
    "a notebook in a card": lambda text: _card(
        "```\n" + json.dumps({"cells": [{"source": ["import os\n", f"{text}\n"]}]}) + "\n```"
    ),
    "YAML with escapes": lambda text: ("README.md", f"---\nnote: {_escape_some(text)}\n---\n# Mine\n".encode()),
    "folded YAML": lambda text: _card(f"---\nnote: >-\n  {_in_the_middle(text, chr(10) + '  ')}\n---"),
    "a continued line": lambda text: _card(f"    {_in_the_middle(text, chr(92) + chr(10) + '    ')}"),
    "a template": lambda text: ("chat_template.jinja", f"{{# {text} #}}".encode()),
    "a vocabulary": lambda text: ("vocab.txt", f"[PAD]\n[UNK]\n{text}\nthe\n".encode()),
    "a binary file": lambda text: ("tokenizer.model", b"\x0a\xff\x00" + text.encode() + b"\x00\x12\xfe"),
    "a header of weights": lambda text: ("model.safetensors", _header(text)),
    "UTF-16": lambda text: ("README.md", f"# Mine\n\n{text}\n".encode("utf-16")),
    "UTF-16 without a byte order mark": lambda text: ("README.md", f"# Mine\n\n{text}\n".encode("utf-16-le")),
    "UTF-16, big endian": lambda text: ("LICENSE", f"Mine\n\n{text}\n".encode("utf-16-be")),
    "base64": lambda text: ("config.json", json.dumps({"note": base64.b64encode(text.encode()).decode()}).encode()),
    "URL-safe base64": lambda text: _card(b"x=" + base64.urlsafe_b64encode(f"note={text}".encode())),
    "a URL": lambda text: _card("https://a.org/?q=" + "".join(f"%{each:02X}" for each in text.encode())),
    "HTML": lambda text: _card("<p>" + "".join(f"&#{ord(each)};" for each in text) + "</p>"),
    "zero-width letters": lambda text: _card(_in_the_middle(text, "\u200b")),
}
FULL_WIDTH = {letter: letter + 0xFEE0 for letter in range(33, 127)}
# Disguises that were thought of after the search was written. SECURITY.md names those that it does not find.
DISGUISES: dict[str, Callable[[str], tuple[str, bytes]]] = {
    "HTML, hexadecimal": lambda text: _card("".join(f"&#x{ord(each):x};" for each in text)),
    "escapes of Python": lambda text: _card("".join(f"\\x{each:02x}" for each in text.encode())),
    "octal escapes": lambda text: _card("".join(f"\\{each:03o}" for each in text.encode())),
    "a URL, encoded twice": lambda text: _card("?q=" + "".join(f"%25{each:02X}" for each in text.encode())),
    "base64 twice": lambda text: _card(base64.b64encode(base64.b64encode(f"note={text}".encode()))),
    "UTF-32": lambda text: ("README.md", f"# Mine\n\n{text}\n".encode("utf-32")),
    "full-width letters": lambda text: _card(_through(text, lambda word: word.translate(FULL_WIDTH))),
    "soft hyphens": lambda text: _card(_in_the_middle(text, "\u00ad")),
    "word joiners": lambda text: _card(_in_the_middle(text, "\u2060")),
    "added strings": lambda text: _card(_in_the_middle(f'x = "{text}"', '" + "')),
    "added strings of a notebook": lambda text: _cell(_in_the_middle(f'x = "{text}"', '" +\n    "')),
    "emphasis": lambda text: _card(_in_the_middle(text, "**")),
    "tags of HTML": lambda text: _card(_in_the_middle(text, "<wbr>")),
    "a comment of HTML": lambda text: _card(_in_the_middle(text, "<!-- -->")),
    "a table": lambda text: _card(f"| what | value |\n|---|---|\n| mine | {text.replace('|', '')} |"),
    "XML": lambda text: _card(f"<key>{text}</key>"),
    "a picture's URL": lambda text: _card(f"![x](https://a.org/?note={text})"),
    # An outsider's, of later still.
    "escapes of Markdown": lambda text: _card(re.sub(r"([_*.])", r"\\\1", text)),
    "adjacent strings": lambda text: _card(_in_the_middle(f"x = ('{text}')", "'\n     '")),
    "a comment of several lines": lambda text: _card(_in_the_middle(f"# {text}", "\n# ")),
    "a quotation of several lines": lambda text: _card(_in_the_middle(f"> {text}", "\n> ")),
    "joined strings of a template": lambda text: _card(_in_the_middle(f"x = '{text}'", "' ~ '")),
    "terminal colours": lambda text: _card(f"\x1b[31m{text}\x1b[0m"),
    "after the mark of UTF-16": lambda text: (
        "x.model",
        b"\xff\xfe" + text.encode() + b"\n" * (len(text.encode()) % 2),
    ),
}
