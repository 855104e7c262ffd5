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
UUID = "1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed"


def letters(alphabet: str, count: int) -> str:
    """Random letters, the same ones each time, with a letter and a digit among them."""
    chosen = random.Random(f"{alphabet}{count}").choices(alphabet, k=count)
    chosen[1:3] = [
        alphabet[-1 if alphabet[-1].isalnum() else 0],
        next((each for each in alphabet if each.isdigit()), alphabet[0]),
    ]
    return "".join(chosen)


Add = Callable[..., None]


def _hugging_face(add: Add) -> None:
    add("hf", "h", "f_", letters(SMALL + LARGE, 34))
    add("hf oauth", "h", "f_oauth_", "eyJhbGciOi.", letters(NAME, 40))
    add("hf jwt", "h", "f_jwt_", "eyJhbGciOi", letters(NAME, 40))
    add("hf organisation", "api", "_org_", letters(SMALL + LARGE, 34))
    add("hf in an environment", "export HF_", "TOKEN=h", "f_", letters(SMALL, 34))
    add("hf behind a name", "mytoken_h", "f_", letters(WORD, 34))
    add("hf behind letters", "tokenIsh", "f_", letters(WORD, 34))
    add("hf in an address", "https://user:h", "f_", letters(WORD, 34), "@huggingface.co/org/name")


def _models(add: Add) -> None:
    add("openai", "s", "k-", letters(WORD, 48))
    add("openai project", "s", "k-proj-", letters(NAME, 120))
    add("openai service", "s", "k-svcacct-", letters(WORD, 60))
    add("openai admin", "s", "k-admin-", letters(WORD, 60))
    add("anthropic", "s", "k-ant-api03-", letters(NAME, 93), "AA")
    add("anthropic, many hyphens", "s", "k-ant-", "api03-", "a1B-" * 24)
    add("langfuse", "s", "k-lf-", UUID)
    add("openrouter", "s", "k-or-v1-", letters(HEX, 64))
    add("deepseek", "s", "k-", letters(HEX, 32))
    add("groq", "gs", "k_", letters(WORD, 52))
    add("xai", "xa", "i-", letters(WORD, 80))
    add("nvidia", "nva", "pi-", letters(NAME, 64))
    add("replicate", "r", "8_", letters(WORD, 37))
    add("perplexity", "pp", "lx-", letters(WORD, 48))
    add("fireworks", "f", "w_", letters(WORD, 24))
    add("pinecone", "pc", "sk_", letters(WORD, 6), "_", letters(WORD, 63))
    add("langsmith", "lsv", "2_pt_", letters(HEX, 32), "_", letters(HEX, 10))
    add("jina", "ji", "na_", letters(WORD, 60))
    add("elevenlabs", "s", "k_", letters(HEX, 48))
    add("cohere", "COHERE_", "API_KEY=", letters(WORD, 40))
    add("mistral", "MISTRAL_", "API_KEY: ", letters(WORD, 32))
    add("together", "TOGETHER_", "API_KEY = '", letters(HEX, 64), "'")
    add("wandb", "WANDB_", "API_KEY=", letters(HEX, 40))
    add("wandb yaml", "wandb:\n  api_", "key: ", letters(HEX, 40))
    add("wandb login", "wandb.log", "in(key='", letters(HEX, 40), "')")
    add("wandb v1", "wand", "b_v1_", letters(WORD, 40))
    add("wandb netrc", "machine api.wandb.ai\n  login user\n  pass", "word ", letters(HEX, 40))
    add("comet", "COMET_", "API_KEY=", letters(WORD, 25))
    add("kaggle json", '{"username": "alice", "k', 'ey": "', letters(HEX, 32), '"}')
    add("kaggle environment", "KAGGLE_", "KEY=", letters(HEX, 32))
    add("kaggle token", "KG", "AT_", letters(HEX, 32))


def _clouds(add: Add) -> None:
    add("aws id", "AK", "IA", letters(LARGE + DIGITS, 16))
    add("aws id for a while", "AS", "IA", letters(LARGE + DIGITS, 16))
    add("aws secret ini", "aws_secret_", "access_key = ", letters(BASE64, 40))
    add("aws secret environment", "export AWS_SECRET_", "ACCESS_KEY=", letters(BASE64, 40))
    add("aws secret json", '{"SecretAccess', 'Key": "', letters(BASE64, 40), '"}')
    add("aws secret python", "aws_secret_", "access_key='", letters(BASE64, 40), "'")
    add("aws session", "aws_session_", "token = ", letters(BASE64, 260))
    add("aws bedrock", "AB", "SK", letters(BASE64, 128))
    add("aws presigned", "https://b.s3.amazonaws.com/k?X-Amz-Sig", "nature=", letters(HEX, 64))
    add("google key", "AI", "za", letters(NAME, 35))
    add("google client", "GOC", "SPX-", letters(NAME, 28))
    add("google access", "ya", "29.", letters(NAME, 120))
    add("google refresh", "1/", "/0", letters(NAME, 60))
    add(
        "google service",
        '{"type": "service_account", "private_',
        'key": "-----BEGIN PRIV',
        "ATE KEY-----\\nMIIE",
        '"}',
    )
    add("azure storage", "DefaultEndpointsProtocol=https;AccountName=a;Account", "Key=", letters(BASE64, 86), "==")
    add("azure sas", "https://a.blob.core.windows.net/c?sv=2024-11-04&sr=c&s", "ig=", letters(WORD, 43), "%3D")
    add("azure client", letters(WORD, 3), "8", "Q~", letters(WORD, 34))
    add("azure bus", "Endpoint=sb://a.servicebus.windows.net/;SharedAccess", "Key=", letters(BASE64, 43), "=")
    add("azure openai", "AZURE_OPENAI_", "API_KEY=", letters(HEX, 32))
    add("digitalocean", "do", "p_v1_", letters(HEX, 64))
    add("digitalocean oauth", "do", "o_v1_", letters(HEX, 64))
    add("databricks", "da", "pi", letters(HEX, 32))
    add("alibaba", "LT", "AI", letters(WORD, 20))
    add("tencent", "AK", "ID", letters(WORD, 32))
    add("yandex", "y", "0_", letters(NAME, 55))
    add("yandex key", "AQ", "VN", letters(NAME, 38))
    add("heroku", "HR", "KU-", letters(NAME, 60))
    add("fly", "Fly", "V1 fm", "2_", letters(BASE64, 100))
    add("supabase", "sb", "p_", letters(HEX, 40))
    add("planetscale", "pscale_", "tkn_", letters(NAME, 43))
    add("pulumi", "pu", "l-", letters(HEX, 40))
    add("terraform", letters(WORD, 14), ".atlas", "v1.", letters(NAME, 67))
    add("vault", "hv", "s.", letters(NAME, 90))
    add("vault batch", "hv", "b.", letters(NAME, 140))
    add("doppler", "dp.", "pt.", letters(WORD, 43))
    add("1password", "op", "s_eyJ", letters(WORD, 250))
    add("grafana", "gl", "sa_", letters(WORD, 32), "_", letters(HEX, 8))
    add("grafana cloud", "gl", "c_eyJ", letters(WORD, 100))
    add("new relic", "NR", "AK-", letters(LARGE + DIGITS, 27))
    add("sentry", "snt", "rys_eyJ", letters(WORD, 100))
    add("tailscale", "tsk", "ey-auth-", letters(WORD, 17), "-", letters(WORD, 32))
    add("cloudflare", "CLOUDFLARE_", "API_TOKEN=", letters(NAME, 40))
    add("datadog", "DD_", "API_KEY=", letters(HEX, 32))


def _packages(add: Add) -> None:
    for name in "pousr":
        add(f"github gh{name}", "gh", name, "_", letters(WORD, 36))
    add("github fine-grained", "github", "_pat_", letters(WORD, 22), "_", letters(WORD, 59))
    for name in ("pat", "rt", "dt", "ptt", "ft", "imt", "agent", "cbt", "soat", "oas"):
        add(f"gitlab {name}", "gl", name, "-", letters(NAME, 20))
    add("bitbucket", "AT", "BB", letters(WORD, 32))
    add("atlassian", "AT", "ATT3", letters(NAME, 180))
    add("npm", "np", "m_", letters(WORD, 36))
    add("npmrc", "//registry.npmjs.org/:_auth", "Token=np", "m_", letters(WORD, 36))
    add("pypi", "py", "pi-AgEIcHlwaS5vcmc", letters(NAME, 120))
    add("rubygems", "ruby", "gems_", letters(HEX, 48))
    add("crates", "ci", "o", letters(WORD, 32))
    add("docker hub", "dck", "r_pat_", letters(NAME, 27))
    add(
        "docker auth",
        '{"auths": {"ghcr.io": {"au',
        'th": "',
        base64.b64encode(b"alice:" + letters(WORD, 20).encode()).decode(),
        '"}}}',
    )
    add("artifactory", "AK", "Cp", letters(WORD, 69))
    add("postman", "PM", "AK-", letters(HEX, 24), "-", letters(HEX, 34))
    add("figma", "fi", "gd_", letters(NAME, 40))
    add("notion", "nt", "n_", letters(WORD, 46))
    add("linear", "li", "n_api_", letters(WORD, 40))
    add("airtable", "pa", "t", letters(WORD, 14), ".", letters(HEX, 64))


def _houses(add: Add) -> None:
    add("netlify", "nf", "p_", letters(WORD, 36))
    add("buildkite", "bk", "ua_", letters(HEX, 40))
    add("circleci", "CCI", "PAT_", letters(WORD, 22), "_", letters(HEX, 40))
    add("sonar", "s", "qu_", letters(HEX, 40))
    add("tavily", "tv", "ly-", letters(WORD, 32))
    add("runpod", "rp", "a_", letters(LARGE + DIGITS, 40))
    add("modal", "a", "k-", letters(WORD, 22))
    add("lambda", "sec", "ret_mykey_", letters(HEX, 32), ".", letters(WORD, 32))
    add("voyage", "p", "a-", letters(WORD, 43))
    add("mapbox", "s", "k.ey", "J", letters(WORD, 60), ".", letters(WORD, 22))
    add("okta", "SS", "WS 00", letters(WORD, 40))
    add("paypal", "access_", "token$production$", letters(SMALL + DIGITS, 16), "$", letters(HEX, 32))
    add("cerebras", "cs", "k-", letters(SMALL + DIGITS, 48))
    add("together", "tg", "p_v1_", letters(NAME, 43))
    add("anyscale", "es", "ecret_", letters(WORD, 26))
    add("neon", "na", "pi_", letters(SMALL + DIGITS, 64))
    add("vercel", "vercel_", "blob_rw_", letters(WORD, 16), "_", letters(WORD, 30))
    add("prefect", "pn", "u_", letters(WORD, 36))
    add("sourcegraph", "sg", "p_", letters(HEX, 40))
    add("hubspot", "pa", "t-na1-", UUID)
    add("trello", "AT", "TA", letters(HEX, 72))
    add("razorpay", "rzp", "_live_", letters(WORD, 14))
    add("honeycomb", "hc", "aik_", letters(SMALL + DIGITS, 58))
    add("typeform", "tf", "p_", letters(NAME, 59))
    add("readme", "rd", "me_", letters(SMALL + DIGITS, 70))
    add("firecrawl", "f", "c-", letters(HEX, 32))
    add("e2b", "e2", "b_", letters(HEX, 40))
    add("llamacloud", "ll", "x-", letters(WORD, 48))
    add("friendli", "fl", "p_", letters(WORD, 46))
    add("modelscope", "m", "s-", UUID)
    add("baidu", "bce-v3/AL", "TAK-", letters(WORD, 21), "/", letters(HEX, 40))
    add("supabase, new", "sb_", "secret_", letters(NAME, 31))
    add("azure devops", letters(WORD, 76), "AZ", "DO", letters(WORD, 4))
    add("nuget", "oy", "2", letters(SMALL + DIGITS, 43))
    add("resend", "r", "e_", letters(WORD, 8), "_", letters(WORD, 24))


def _messages(add: Add) -> None:
    add("slack bot", "xo", "xb-", letters(DIGITS, 12), "-", letters(DIGITS, 12), "-", letters(WORD, 24))
    add("slack user", "xo", "xp-", letters(DIGITS, 12), "-", letters(HEX, 32))
    add("slack app", "xa", "pp-1-A0", letters(LARGE, 9), "-", letters(DIGITS, 12), "-", letters(HEX, 64))
    add(
        "slack webhook",
        "https://hooks.sla",
        "ck.com/services/T0",
        letters(LARGE, 9),
        "/B0",
        letters(LARGE, 9),
        "/",
        letters(WORD, 24),
    )
    add("discord webhook", "https://discord.com/api/web", "hooks/", letters(DIGITS, 18), "/", letters(NAME, 68))
    add("discord bot", "M", letters(WORD, 25), ".", letters(WORD, 6), ".", letters(NAME, 38))
    add("teams webhook", "https://a.webhook.off", "ice.com/webhookb2/", letters(HEX, 36))
    add("telegram", letters("123456789", 10), ":", "AA", letters(NAME, 33))
    add("stripe", "s", "k_live_", letters(WORD, 24))
    add("stripe test", "s", "k_test_", letters(WORD, 24))
    add("stripe restricted", "r", "k_live_", letters(WORD, 24))
    add("stripe webhook", "wh", "sec_", letters(WORD, 32))
    add("square", "sq", "0atp-", letters(NAME, 22))
    add("shopify", "shp", "at_", letters(HEX, 32))
    add("sendgrid", "S", "G.", letters(NAME, 22), ".", letters(NAME, 43))
    add("brevo", "xkey", "sib-", letters(HEX, 64), "-", letters(WORD, 16))
    add("mailchimp", letters(HEX, 32), "-u", "s14")
    add("mailgun", "ke", "y-", letters(HEX, 32))
    add("twilio", "S", "K", letters(HEX, 32))
    add("facebook", "EA", "A", letters(WORD, 160))
    add("twitter", "A" * 22, letters(WORD, 80))


def _keys(add: Add) -> None:
    for name in ("", "RSA ", "EC ", "DSA ", "OPENSSH ", "ENCRYPTED "):
        add(f"pem {name}", "-----BEGIN ", name, "PRIV", "ATE KEY-----\nMIIEvQIBADANBg")
    add("pgp", "-----BEGIN PGP PRIV", "ATE KEY BLOCK-----\n\nlQdGB")
    add("putty", "PuTTY-User-", "Key-File-3: ssh-ed25519")
    add("age", "AGE-SEC", "RET-KEY-1", letters("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58))
    add("jwk", '{"kty": "EC", "crv": "P-256", "', 'd": "', letters(NAME, 43), '"}')
    add("jwt", "ey", "JhbGciOiJIUzI1NiJ9.ey", "J", letters(WORD, 40), ".", letters(NAME, 43))
    add("address", "https://alice:S3cr", "3tPass@nas.acme.com/a.zip")
    add("postgres", "postgresql://alice:Tr0ub4", "dor@db.acme.com:5432/x")
    add("mongodb", "mongodb+srv://alice:c0rr3ct", "horse@cluster0.acme.mongodb.net")
    add("redis", "redis://:h0rseba", "ttery@cache.acme.com:6379")
    add("ftp", "ftp://alice:5taple", "x@ftp.acme.com")
    add("address of packages", "get https://bot:7hatsr1", "ght@packages.acme.com/simple")
    add("database password", "DB_PASS", "WORD=c0rrect-horse")
    add("password yaml", "pass", "word: Tr0ub4dor&3x")
    add("password json", '{"pass', 'word": "c0rrect-h0rse"}')
    add("basic header", "Author", "ization: Basic ", letters(BASE64, 32))
    add("bearer header", "Author", "ization: Bearer ", letters(NAME, 40))
    add("client secret", '{"client_', 'secret": "', letters(NAME, 40), '"}')
    add("oct jwk", '{"kty": "oct", "', 'k": "', letters(NAME, 43), '"}')
    add("django", "django-inse", "cure-", letters(WORD + "!@#$%^&*(-_=+)", 50))
    add("cloudfront", "https://d1.cloudfront.net/x?Expires=1&Sign", "ature=", letters(NAME, 200))
    add("link", "https://nas.acme.com/x.zip?to", "ken=", letters(WORD, 40))
    add("curl", "curl -u ali", "ce:c0rrecth0rse https://nas.acme.com")
    add("bcrypt", "$2", "b$12$", letters(WORD, 53))
    add("secret key", "SECRET_", "KEY = '", letters(WORD, 50), "'")


def shapes() -> dict[str, str]:
    """A text for each kind of secret, with the words that stand before it where it has no form of its own."""
    made: dict[str, str] = {}

    def add(kind: str, *parts: str) -> None:
        made[kind] = "".join(parts)

    for group in (_hugging_face, _models, _clouds, _packages, _houses, _messages, _keys):
        group(add)
    return made


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


# The name of a file and its content.
PLACES: dict[str, Callable[[str], tuple[str, bytes]]] = {
    "a card": lambda text: ("README.md", f"# Mine\n\n{text}\n".encode()),
    "a card's block": lambda text: ("README.md", f"# Mine\n\n```yaml\n{text}\n```\n".encode()),
    "a list in a card": lambda text: ("README.md", f"# Mine\n\n- `{text}`, of mine\n".encode()),
    "a string of JSON": lambda text: ("config.json", json.dumps({"deep": [{"note": text}]}, indent=2).encode()),
    "a key of JSON": lambda text: ("eval.json", json.dumps({text: 1}).encode()),
    "escapes of JSON": lambda text: ("tokenizer.json", f'{{"added": {_escape_some(text)}}}'.encode()),
    "JSON in JSON": lambda text: ("training.json", json.dumps({"cells": json.dumps({"source": [text]})}).encode()),
    "a notebook in a card": lambda text: (
        "README.md",
        ("```\n" + json.dumps({"cells": [{"source": ["import os\n", f"{text}\n"]}]}) + "\n```\n").encode(),
    ),
    "YAML with escapes": lambda text: ("README.md", f"---\nnote: {_escape_some(text)}\n---\n# Mine\n".encode()),
    "folded YAML": lambda text: (
        "README.md",
        f"---\nnote: >-\n  {_in_the_middle(text, chr(10) + '  ')}\n---\n".encode(),
    ),
    "a continued line": lambda text: (
        "README.md",
        f"    {_in_the_middle(text, chr(92) + chr(10) + '    ')}\n".encode(),
    ),
    "a template": lambda text: ("chat_template.jinja", f"{{# {text} #}}".encode()),
    "a vocabulary": lambda text: ("vocab.txt", f"[PAD]\n[UNK]\n{text}\nthe\n".encode()),
    "a binary file": lambda text: ("tokenizer.model", b"\x0a\xff\x00" + text.encode() + b"\x00\x12\xfe"),
    "a header of weights": lambda text: ("model.safetensors", _header(text)),
    "UTF-16": lambda text: ("README.md", f"# Mine\n\n{text}\n".encode("utf-16")),
    "UTF-16 without a byte order mark": lambda text: ("README.md", f"# Mine\n\n{text}\n".encode("utf-16-le")),
    "UTF-16, big endian": lambda text: ("LICENSE", f"Mine\n\n{text}\n".encode("utf-16-be")),
    "base64": lambda text: ("config.json", json.dumps({"note": base64.b64encode(text.encode()).decode()}).encode()),
    "URL-safe base64": lambda text: (
        "README.md",
        b"# Mine\n\nx=" + base64.urlsafe_b64encode(f"note={text}".encode()) + b"\n",
    ),
    "a URL": lambda text: (
        "README.md",
        ("https://a.org/?q=" + "".join(f"%{each:02X}" for each in text.encode()) + "\n").encode(),
    ),
    "HTML": lambda text: ("README.md", ("<p>" + "".join(f"&#{ord(each)};" for each in text) + "</p>\n").encode()),
    "zero-width letters": lambda text: ("README.md", f"# Mine\n\n{_in_the_middle(text, chr(0x200B))}\n".encode()),
}


def _through(text: str, write: Callable[[str], str]) -> str:
    """A text with its longest word written in another way."""
    word = max(re.findall(r"[A-Za-z0-9_]+", text), key=len)
    return text.replace(word, write(word), 1)


def _card(content: str | bytes) -> tuple[str, bytes]:
    body = content.encode() if isinstance(content, str) else content
    return "README.md", b"# Mine\n\n" + body + b"\n"


# Disguises that were thought of after the search was written, so that their score says more of others.
DISGUISES: dict[str, Callable[[str], tuple[str, bytes]]] = {
    "HTML, hexadecimal": lambda text: _card("".join(f"&#x{ord(each):x};" for each in text)),
    "escapes of Python": lambda text: _card("".join(f"\\x{each:02x}" for each in text.encode())),
    "octal escapes": lambda text: _card("".join(f"\\{each:03o}" for each in text.encode())),
    "a URL, encoded twice": lambda text: _card("?q=" + "".join(f"%25{each:02X}" for each in text.encode())),
    "base64 twice": lambda text: _card(base64.b64encode(base64.b64encode(f"note={text}".encode()))),
    "base32": lambda text: _card(base64.b32encode(f"note={text}".encode())),
    "hexadecimal": lambda text: _card(text.encode().hex()),
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
    "quoted-printable": lambda text: _card("".join(f"={each:02X}" for each in text.encode())),
    "a list of letters": lambda text: ("config.json", json.dumps({"note": list(text)}).encode()),
    "a list of numbers": lambda text: ("config.json", json.dumps({"note": list(text.encode())}).encode()),
    # An outsider's, of later still.
    "escapes of Markdown": lambda text: _card(re.sub(r"([_*.])", r"\\\1", text)),
    "adjacent strings": lambda text: _card(_in_the_middle(f"x = ('{text}')", "'\n     '")),
    "a comment of several lines": lambda text: _card(_in_the_middle(f"# {text}", "\n# ")),
    "a quotation of several lines": lambda text: _card(_in_the_middle(f"> {text}", "\n> ")),
    "a long line broken in two": lambda text: _card(_in_the_middle("python train.py " * 5 + text, "\n")),
    "joined strings of a template": lambda text: _card(_in_the_middle(f"x = '{text}'", "' ~ '")),
    "terminal colours": lambda text: _card(f"\x1b[31m{text}\x1b[0m"),
    "after a byte order mark of UTF-16": lambda text: (
        "tokenizer.model",
        b"\xff\xfe" + text.encode() + b"\n" * (len(text.encode()) % 2),
    ),
    "backwards": lambda text: _card(text[::-1]),
}
