"""Secrets that nobody has, of every shape we know, and the places where a folder can hold one.

All are made here from parts and from random letters of a fixed seed, so that no scanner takes this file for a leak.
"""

from __future__ import annotations

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
    chosen[1:3] = [
        alphabet[-1 if alphabet[-1].isalnum() else 0],
        next((each for each in alphabet if each.isdigit()), alphabet[0]),
    ]
    return "".join(chosen)


# A kind of secret in each line, and how it is written: in parts that "·" parts, with random letters for "<WORD 48>",
# "⏎" for the end of a line, and for "{}" each of the words in the name.
_TABLE = r"""
# Hugging Face
hf = h·f_·<SMALL+LARGE 34>
hf oauth = h·f_oauth_·eyJhbGciOi.·<NAME 40>
hf jwt = h·f_jwt_·eyJhbGciOi·<NAME 40>
hf organisation = api·_org_·<SMALL+LARGE 34>
hf in an environment = export HF_·TOKEN=h·f_·<SMALL 34>
hf behind a name = mytoken_h·f_·<WORD 34>
hf behind letters = tokenIsh·f_·<WORD 34>
hf in an address = https://user:h·f_·<WORD 34>·@huggingface.co/org/name
# models and experiments
openai = s·k-·<WORD 48>
openai project = s·k-proj-·<NAME 120>
openai service = s·k-svcacct-·<WORD 60>
openai admin = s·k-admin-·<WORD 60>
anthropic = s·k-ant-api03-·<NAME 93>·AA
anthropic, many hyphens = s·k-ant-·api03-·a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-a1B-
langfuse = s·k-lf-·1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed
openrouter = s·k-or-v1-·<HEX 64>
deepseek = s·k-·<HEX 32>
groq = gs·k_·<WORD 52>
xai = xa·i-·<WORD 80>
nvidia = nva·pi-·<NAME 64>
replicate = r·8_·<WORD 37>
perplexity = pp·lx-·<WORD 48>
fireworks = f·w_·<WORD 24>
pinecone = pc·sk_·<WORD 6>·_·<WORD 63>
langsmith = lsv·2_pt_·<HEX 32>·_·<HEX 10>
jina = ji·na_·<WORD 60>
elevenlabs = s·k_·<HEX 48>
cohere = COHERE_·API_KEY=·<WORD 40>
mistral = MISTRAL_·API_KEY: ·<WORD 32>
together = tg·p_v1_·<NAME 43>
wandb = WANDB_·API_KEY=·<HEX 40>
wandb yaml = wandb:⏎  api_·key: ·<HEX 40>
wandb login = wandb.log·in(key='·<HEX 40>·')
wandb v1 = wand·b_v1_·<WORD 40>
wandb netrc = machine api.wandb.ai⏎  login user⏎  pass·word ·<HEX 40>
comet = COMET_·API_KEY=·<WORD 25>
kaggle json = {"username": "alice", "k·ey": "·<HEX 32>·"}
kaggle environment = KAGGLE_·KEY=·<HEX 32>
kaggle token = KG·AT_·<HEX 32>
# clouds
aws id = AK·IA·<LARGE+DIGITS 16>
aws id for a while = AS·IA·<LARGE+DIGITS 16>
aws secret ini = aws_secret_·access_key = ·<BASE64 40>
aws secret environment = export AWS_SECRET_·ACCESS_KEY=·<BASE64 40>
aws secret json = {"SecretAccess·Key": "·<BASE64 40>·"}
aws secret python = aws_secret_·access_key='·<BASE64 40>·'
aws session = aws_session_·token = ·<BASE64 260>
aws bedrock = AB·SK·<BASE64 128>
aws presigned = https://b.s3.amazonaws.com/k?X-Amz-Sig·nature=·<HEX 64>
google key = AI·za·<NAME 35>
google client = GOC·SPX-·<NAME 28>
google access = ya·29.·<NAME 120>
google refresh = 1/·/0·<NAME 60>
google service = {"type": "service_account", "private_·key": "-----BEGIN PRIV·ATE KEY-----\nMIIE·"}
azure storage = DefaultEndpointsProtocol=https;AccountName=a;Account·Key=·<BASE64 86>·==
azure sas = https://a.blob.core.windows.net/c?sv=2024-11-04&sr=c&s·ig=·<WORD 43>·%3D
azure client = <WORD 3>·8·Q~·<WORD 34>
azure bus = Endpoint=sb://a.servicebus.windows.net/;SharedAccess·Key=·<BASE64 43>·=
azure openai = AZURE_OPENAI_·API_KEY=·<HEX 32>
digitalocean = do·p_v1_·<HEX 64>
digitalocean oauth = do·o_v1_·<HEX 64>
databricks = da·pi·<HEX 32>
alibaba = LT·AI·<WORD 20>
tencent = AK·ID·<WORD 32>
yandex = y·0_·<NAME 55>
yandex key = AQ·VN·<NAME 38>
heroku = HR·KU-·<NAME 60>
fly = Fly·V1 fm·2_·<BASE64 100>
supabase = sb·p_·<HEX 40>
planetscale = pscale_·tkn_·<NAME 43>
pulumi = pu·l-·<HEX 40>
terraform = <WORD 14>·.atlas·v1.·<NAME 67>
vault = hv·s.·<NAME 90>
vault batch = hv·b.·<NAME 140>
doppler = dp.·pt.·<WORD 43>
1password = op·s_eyJ·<WORD 250>
grafana = gl·sa_·<WORD 32>·_·<HEX 8>
grafana cloud = gl·c_eyJ·<WORD 100>
new relic = NR·AK-·<LARGE+DIGITS 27>
sentry = snt·rys_eyJ·<WORD 100>
tailscale = tsk·ey-auth-·<WORD 17>·-·<WORD 32>
cloudflare = CLOUDFLARE_·API_TOKEN=·<NAME 40>
datadog = DD_·API_KEY=·<HEX 32>
# code and packages
github gh{p,o,u,s,r} = gh·{}·_·<WORD 36>
github fine-grained = github·_pat_·<WORD 22>·_·<WORD 59>
gitlab {pat,rt,dt,ptt,ft,imt,agent,cbt,soat,oas} = gl·{}·-·<NAME 20>
bitbucket = AT·BB·<WORD 32>
atlassian = AT·ATT3·<NAME 180>
npm = np·m_·<WORD 36>
npmrc = //registry.npmjs.org/:_auth·Token=np·m_·<WORD 36>
pypi = py·pi-AgEIcHlwaS5vcmc·<NAME 120>
rubygems = ruby·gems_·<HEX 48>
crates = ci·o·<WORD 32>
docker hub = dck·r_pat_·<NAME 27>
docker auth = {"auths": {"ghcr.io": {"au·th": "·YWxpY2U6MjkwdGJXQVVIdEpBZW9BNFlWQ1c="}}}
artifactory = AK·Cp·<WORD 69>
postman = PM·AK-·<HEX 24>·-·<HEX 34>
figma = fi·gd_·<NAME 40>
notion = nt·n_·<WORD 46>
linear = li·n_api_·<WORD 40>
airtable = pa·t·<WORD 14>·.·<HEX 64>
# other houses
netlify = nf·p_·<WORD 36>
buildkite = bk·ua_·<HEX 40>
circleci = CCI·PAT_·<WORD 22>·_·<HEX 40>
sonar = s·qu_·<HEX 40>
tavily = tv·ly-·<WORD 32>
runpod = rp·a_·<LARGE+DIGITS 40>
modal = a·k-·<WORD 22>
lambda = sec·ret_mykey_·<HEX 32>·.·<WORD 32>
voyage = p·a-·<WORD 43>
mapbox = s·k.ey·J·<WORD 60>·.·<WORD 22>
okta = SS·WS 00·<WORD 40>
paypal = access_·token$production$·<SMALL+DIGITS 16>·$·<HEX 32>
cerebras = cs·k-·<SMALL+DIGITS 48>
anyscale = es·ecret_·<WORD 26>
neon = na·pi_·<SMALL+DIGITS 64>
vercel = vercel_·blob_rw_·<WORD 16>·_·<WORD 30>
prefect = pn·u_·<WORD 36>
sourcegraph = sg·p_·<HEX 40>
hubspot = pa·t-na1-·1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed
trello = AT·TA·<HEX 72>
razorpay = rzp·_live_·<WORD 14>
honeycomb = hc·aik_·<SMALL+DIGITS 58>
typeform = tf·p_·<NAME 59>
readme = rd·me_·<SMALL+DIGITS 70>
firecrawl = f·c-·<HEX 32>
e2b = e2·b_·<HEX 40>
llamacloud = ll·x-·<WORD 48>
friendli = fl·p_·<WORD 46>
modelscope = m·s-·1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed
baidu = bce-v3/AL·TAK-·<WORD 21>·/·<HEX 40>
supabase, new = sb_·secret_·<NAME 31>
azure devops = <WORD 76>·AZ·DO·<WORD 4>
nuget = oy·2·<SMALL+DIGITS 43>
resend = r·e_·<WORD 8>·_·<WORD 24>
# messages and money
slack bot = xo·xb-·<DIGITS 12>·-·<DIGITS 12>·-·<WORD 24>
slack user = xo·xp-·<DIGITS 12>·-·<HEX 32>
slack app = xa·pp-1-A0·<LARGE 9>·-·<DIGITS 12>·-·<HEX 64>
slack webhook = https://hooks.sla·ck.com/services/T0·<LARGE 9>·/B0·<LARGE 9>·/·<WORD 24>
discord webhook = https://discord.com/api/web·hooks/·<DIGITS 18>·/·<NAME 68>
discord bot = M·<WORD 25>·.·<WORD 6>·.·<NAME 38>
teams webhook = https://a.webhook.off·ice.com/webhookb2/·<HEX 36>
telegram = <123456789 10>·:·AA·<NAME 33>
stripe = s·k_live_·<WORD 24>
stripe test = s·k_test_·<WORD 24>
stripe restricted = r·k_live_·<WORD 24>
stripe webhook = wh·sec_·<WORD 32>
square = sq·0atp-·<NAME 22>
shopify = shp·at_·<HEX 32>
sendgrid = S·G.·<NAME 22>·.·<NAME 43>
brevo = xkey·sib-·<HEX 64>·-·<WORD 16>
mailchimp = <HEX 32>·-u·s14
mailgun = ke·y-·<HEX 32>
twilio = S·K·<HEX 32>
facebook = EA·A·<WORD 160>
twitter = AAAAAAAAAAAAAAAAAAAAAA·<WORD 80>
# keys and passwords of no one house
pem {,RSA ,EC ,DSA ,OPENSSH ,ENCRYPTED } = -----BEGIN ·{}·PRIV·ATE KEY-----⏎MIIEvQIBADANBg
pgp = -----BEGIN PGP PRIV·ATE KEY BLOCK-----⏎⏎lQdGB
putty = PuTTY-User-·Key-File-3: ssh-ed25519
age = AGE-SEC·RET-KEY-1·<QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L 58>
jwk = {"kty": "EC", "crv": "P-256", "·d": "·<NAME 43>·"}
jwt = ey·JhbGciOiJIUzI1NiJ9.ey·J·<WORD 40>·.·<NAME 43>
address = https://alice:S3cr·3tPass@nas.acme.com/a.zip
postgres = postgresql://alice:Tr0ub4·dor@db.acme.com:5432/x
mongodb = mongodb+srv://alice:c0rr3ct·horse@cluster0.acme.mongodb.net
redis = redis://:h0rseba·ttery@cache.acme.com:6379
ftp = ftp://alice:5taple·x@ftp.acme.com
address of packages = get https://bot:7hatsr1·ght@packages.acme.com/simple
database password = DB_PASS·WORD=c0rrect-horse
password yaml = pass·word: Tr0ub4dor&3x
password json = {"pass·word": "c0rrect-h0rse"}
basic header = Author·ization: Basic ·<BASE64 32>
bearer header = Author·ization: Bearer ·<NAME 40>
client secret = {"client_·secret": "·<NAME 40>·"}
oct jwk = {"kty": "oct", "·k": "·<NAME 43>·"}
django = django-inse·cure-·<WORD+SIGNS 50>
cloudfront = https://d1.cloudfront.net/x?Expires=1&Sign·ature=·<NAME 200>
link = https://nas.acme.com/x.zip?to·ken=·<WORD 40>
curl = curl -u ali·ce:c0rrecth0rse https://nas.acme.com
bcrypt = $2·b$12$·<WORD 53>
secret key = SECRET_·KEY = '·<WORD 50>·'
"""


def shapes() -> dict[str, str]:
    """A text for each kind of secret, with the words that stand before it where it has no form of its own."""
    made = {}
    for line in _TABLE.splitlines():
        kind, is_row, written = line.partition(" = ")
        several = re.fullmatch(r"(.*)\{(.*)\}", kind)
        for part in several[2].split(",") if several else [""] if is_row else []:
            text = re.sub(r"<(\S+) (\d+)>", _random, written.replace("{}", part).replace("·", ""))
            made[several[1] + part if several else kind] = text.replace("⏎", "\n")
    return made


def _random(found: re.Match[str]) -> str:
    """Random letters of an alphabet, which is named or written out, or of several together."""
    return letters("".join(globals().get(name, name) for name in found[1].split("+")), int(found[2]))


def _escape_some(text: str) -> str:
    """A string of JSON in which every third letter is an escape."""
    return (
        '"'
        + "".join(
            f"\\u{ord(each):04x}" if index % 3 == 0 or each in '"\\\n' else each for index, each in enumerate(text)
        )
        + '"'
    )


def _in_the_middle(text: str, between: str) -> str:
    """A text with something in the middle of its longest word."""
    word = max(re.finditer(r"[A-Za-z0-9_]+", text), key=lambda found: len(found[0]))
    place = (word.start() + word.end()) // 2
    return text[:place] + between + text[place:]


def _header(text: str) -> bytes:
    weights = save({}, metadata={"format": "pt", "command": "@"})
    header = weights[8:].replace(b'"@"', _escape_some(text).encode())
    return len(header).to_bytes(8, "little") + header


def _through(text: str, write: Callable[[str], str]) -> str:
    """A text with its longest word written in another way."""
    word = max(re.findall(r"[A-Za-z0-9_]+", text), key=len)
    return text.replace(word, write(word), 1)


def _card(content: str | bytes) -> tuple[str, bytes]:
    body = content.encode() if isinstance(content, str) else content
    return "README.md", b"# Mine\n\n" + body + b"\n"


# The name of a file and its content.
PLACES: dict[str, Callable[[str], tuple[str, bytes]]] = {
    "a card": lambda text: _card(text),
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
# Disguises that were thought of after the search was written. SECURITY.md names those that it does not find.
DISGUISES: dict[str, Callable[[str], tuple[str, bytes]]] = {
    "HTML, hexadecimal": lambda text: _card("".join(f"&#x{ord(each):x};" for each in text)),
    "escapes of Python": lambda text: _card("".join(f"\\x{each:02x}" for each in text.encode())),
    "octal escapes": lambda text: _card("".join(f"\\{each:03o}" for each in text.encode())),
    "a URL, encoded twice": lambda text: _card("?q=" + "".join(f"%25{each:02X}" for each in text.encode())),
    "base64 twice": lambda text: _card(base64.b64encode(base64.b64encode(f"note={text}".encode()))),
    "UTF-32": lambda text: ("README.md", f"# Mine\n\n{text}\n".encode("utf-32")),
    "full-width letters": lambda text: _card(
        _through(text, lambda word: "".join(chr(ord(each) + 0xFEE0) for each in word if each.isascii()))
    ),
    "soft hyphens": lambda text: _card(_in_the_middle(text, "\u00ad")),
    "word joiners": lambda text: _card(_in_the_middle(text, "\u2060")),
    "added strings": lambda text: _card(_in_the_middle(f'x = "{text}"', '" + "')),
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
    "after a byte order mark of UTF-16": lambda text: (
        "tokenizer.model",
        b"\xff\xfe" + text.encode() + b"\n" * (len(text.encode()) % 2),
    ),
}
