"""The search for secrets against a corpus: every known shape in every place, and files that are harmless."""

import base64
import contextlib
import io
import json
import random
import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from transformers import CONFIG_MAPPING

from hf_ext.hub.disclosure import SecretFound, refuse_secret
from hf_ext.hub.secret_shapes import find_secrets

from . import secret_uses
from .secret_corpus import DISGUISES, HEX, PLACES, WORD, letters, shapes
from .secret_uses import uses

ROOT = Path(__file__).parents[2]


def find(folder: Path, name: str, content: bytes) -> SecretFound | None:
    (folder / name).write_bytes(content)
    try:
        return refuse_secret(folder / name, name)
    except SecretFound as error:
        return error


@pytest.mark.parametrize("place", PLACES | DISGUISES)
def test_every_secret_is_refused_in_every_place_and_disguise(place, tmp_path):
    made = shapes()
    assert len(made) >= 120 and len(set(made.values())) == len(made)
    files = {kind: (PLACES | DISGUISES)[place](text) for kind, text in made.items()}
    found = {kind: find(tmp_path, *file) for kind, file in files.items()}
    assert [kind for kind, error in found.items() if error is None] == []
    for kind, error in found.items():
        assert error.file == files[kind][0] and error.kind
        # Nothing that is secret is in the message: no long word of it.
        assert not any(word in str(error) for word in made[kind].split() if len(word) > 12 and word.isalnum())


@pytest.mark.parametrize("place", secret_uses.PLACES)
def test_everyday_uses_are_refused_in_every_place(place, tmp_path):
    missed = [kind for kind, text in uses().items() if find(tmp_path, *secret_uses.PLACES[place](text)) is None]
    assert len(uses()) >= 200 and missed == secret_uses.NOT_FOUND


# What stands where a secret would, and uses of the same letters for something else.
PLACEHOLDERS = (
    *("hf_xxx", "<YOUR_TOKEN>", "$TOKEN", "${TOKEN}", "YOUR_API_KEY", "{{ token }}", "os.environ['TOKEN1']"),
    *("getpass()", "None", "***", "changeme1", "xxxxxxxx", "%TOKEN%", "env:TOKEN1", f"hf_{34 * '0'}"),
    *("hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567", "sk-1234567890abcdef1234567890abcdef"),
)
WITH_PLACEHOLDERS = (
    *("export HF_TOKEN=P", "hf auth login --token P", "curl -u alice:P https://a.org", "redis-cli -a P ping"),
    *("| service | API token |\n|---|---|\n| hub | P |", "user,password\nalice,P", "password: P"),
    *("<tr><th>password</th><th>x</th></tr><tr><td>P</td><td>1</td></tr>", "machine a login b password P"),
    "az login -u a -p P",
)
HARMLESS = r"""
python train.py -p fp16x2 -a resnet50 -k 3 -w 8workers
7z a model.7z -mx9 data2; ssh -p 2222 alice@nas1; unzip -p archive2.zip model2.json > x
| token | id | note |⏎|---|---|---|⏎| Wav2Vec2FeatureExtractor | 1 | x |
token	id	score⏎_the1	3	-4.5⏎BENCHMARK_LONG_TOKEN_12345678901	4	-3
key,value⏎learning_rate,3e-4⏎model,meta-llama/Llama-3.1-8B-Instruct
| key | value |⏎|---|---|⏎| sha | v1.2.3-rc1-a1b2c3 |
The password is required in version2. The password is base64-encoded. Password is at least 8chars long.
pass = transform2d(x1)⏎pass: 3/10⏎Pass: 12 of 14, Fail: 2⏎pw = w2v_model(1)⏎pass_rate: 0.91 pass@10: 60.1
loss.py:1234:12:E501:line2long⏎epoch:1000:loss:0.32:acc0.91⏎12:34:56:INFO:step100done
token = AutoTokenizer.from_pretrained('facebook/wav2vec2-base-960h'), token: Qwen2_5OmniThinkerForConditionalGeneration
auth=('user', 'password1') login('alice', getpass()) SecureString $env:PASS1; form.password is Valid1
echo hello2 | sudo tee x; echo 'user:password' | chpasswd; sqlplus user/password@db; openssl rsa -passin pass:$PASS1
variable "db_password" {⏎  type = string⏎  sensitive = true⏎}⏎output "y" {⏎  value = "z9abcdefgh"⏎}
Cookie: session=abc⏎dataset_key  image_key  split⏎0  image1  train2024⏎  key     name    size⏎0 a1b2 x y
secret,count⏎user_secret_1,2⏎The-Secret2,1⏎password,count⏎password,10⏎letmein,3
## Passwords⏎- must have 8char⏎password:⏎  - required⏎  - min8⏎requirepass: foobared⏎masterauth <master-password>
hf_ext hf_xet hf_hub_download hf_token hf_olmo_hybrid_model_with_a_long_name task-oriented-classification-of-things
sk-learn ask-me-anything-about-this-model risk-0123456789012345678 AKIAN AKIAabcdefgh12345678 ghp_short xoxb-
primer ACCATGGCATTACGGATACA sequence,ACCAGGTTCCAATGCATGCA
API-REFERENCE-2024 API-GETCONFIGURATIONOFTHEMODELS sm_aat_normalized_2 shippo_test_data live_2024 s.startswith x_mmk
dnkey-value p8e-adapter duffel_test_of_version_2 cmVmdA== 4b1d9f86d081884c7d659a2feaa0c55ad015a3bf42 sat.x.y.z
self_hf_abcdefghijklmnopqrstuvwxyz -----BEGIN CERTIFICATE----- -----BEGIN PUBLIC KEY----- AIzashort glpat-short
pa-a-word-in-an-address-of-some-forty-three-ch re_compiled_abcdefghijklmnopqrstuv sk-based-classification-in-use
Client("meta-llama/Llama-3.1-8B-Instruct-v20240723") Client("Wav2Vec2FeatureExtractor") password: "one two"
identified by the id 'x9'; mc alias list; http localhost:8000/x1 -a; --token abc123 --api-key token-abc123 --token=$T
InferenceSession("model-v2.onnx", "CUDAExecutionProvider2") sqlite3.connect('runs2024.db') s.login('a', 'your word')
pk_live_9f86d081884c7d659a2FEAA0 pk_test_9f86d081884c7d659a2FEAA0 https://js.stripe.com/v3
https://discuss.example/t/how-to-fine-tune-a-model-on-a-single-card/12345 exp_Denoise24Sigma25Channels64Blocks8Lr3e4
cacheKey: linux-Py311-9f86d081884c7d659a2feaa0c55ad015 PublicKey = wJalrXUtnFEMI9K7MDENGbPxRfiCYzq8LmT4vB2nxyz0=
"image_key": "pixel_values", "dataset_key": "HuggingFaceM4/COCO2017v1" cifar_test_9f86d081884c7d659a2feaa0c55ad015
passwd⏎password⏎password_hash1⏎password2vec⏎token⏎token_type_ids_2d_tensor⏎api_key⏎access_token_of_version_2
["password", "credit_card_1", "ipv4_address"] {"PASSWORD": "LABEL_12"}⏎▁password	-12.3⏎passwd	-7.5e1
postgresql://postgres:postgres@localhost:5432/x amqp://guest:guest@mq mysql://root:root@127.0.0.1
<input type="password" id="field2a"> self._auth = HTTPBasicAuth2("x") _auth=httpx2.BasicAuth(a) ---- BEGIN SSH2 PUBLIC
$1$ and $y$=f(x_1,x_2,x_3,x_4,x_5,x_6)+\\epsilon_{ijk} cost $5$; FILE_PAT=data/train-00001-of-00010-Part2b3.parquet
https://github.com/acme/hooks/commit/9f86d081884c7d659a2feaa0c55ad015a3bf4f1b https://x.org/docs/webhooks/guide-v2-3-4
X-Cache-Key: 9f86d081884c7d659a2feaa0c55ad015 sha1:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b ?api_key=demo&appid=my_app
mnemonic: the twelve words of a wallet. cookies = {"theme": "dark"} APP_KEY=base64:... {"key": "k", "secret": "none"}
"""


def test_placeholders_and_other_uses_of_the_same_letters_are_not_refused(tmp_path):
    texts = [re.sub(r"\bP\b", lambda _, each=each: each, use) for use in WITH_PLACEHOLDERS for each in PLACEHOLDERS]
    texts += [*(line.replace("⏎", "\n") for line in HARMLESS.strip().split("\n")), *secret_uses.HARMLESS]
    files = [(name, write(text)) for text in texts for name, write in secret_uses.PLACES.items()]
    taken = [(place, file) for place, file in files if find(tmp_path, *file) is not None]
    assert len(files) >= 600 and taken == []


def configurations() -> dict[str, str]:
    """The default configurations of a third of transformers' models; no file here comes from the Hub."""
    made = {}
    for name in sorted(CONFIG_MAPPING)[::3]:
        # Some are of several models and have no default, or refuse their own.
        with contextlib.suppress(ValueError, TypeError, AttributeError, ImportError, StrictDataclassError):
            made[f"{name}.json"] = CONFIG_MAPPING[name]().to_json_string()
    return made


def documents() -> dict[str, str]:
    """Cards, notebooks, results and recipes of this repository, and those of the packages that we need."""
    kinds = (".md", ".json", ".yaml", ".ipynb", ".txt", ".toml", ".jinja")
    paths = [path for folder in ("docs", "model_cards", "examples") for path in (ROOT / folder).rglob("*")]
    found = {str(path): path.read_text(encoding="utf-8") for path in paths if path.suffix in kinds and path.is_file()}
    ours = ("transformers", "diffusers", "peft", "accelerate", "datasets", "evaluate", "huggingface-hub", "click")
    for name in ours:
        for file in distribution(name).files or ():
            # Lists of hashes are long, and alike.
            named = file.name in ("METADATA", "LICENSE") or (name, file.name) == ("peft", "RECORD")
            if named or file.suffix in (".md", ".txt", ".json", ".yaml"):
                found[str(file)] = Path(str(file.locate())).read_text(encoding="utf-8")
    return found


def oddities() -> dict[str, str]:
    """Beginnings, placeholders and random letters that stand in public repositories and open nothing."""
    rng = random.Random(0)
    picture = io.BytesIO()
    Image.frombytes("RGB", (64, 64), rng.randbytes(64 * 64 * 3)).save(picture, "PNG")
    drawn = re.sub("[+/=]", "x", base64.b64encode(picture.getvalue()).decode())
    names = ("the", "Ġpassword", "token", "sk", "-", "hf", "_", "secret", "key")
    words = {word: index for index, word in enumerate(names)}
    signed = [base64.urlsafe_b64encode(b'{"hash":"' + rng.randbytes(32)).decode().strip("=") for _ in range(3)]
    extra = {f"extra_id_{n}": f"<extra_id_{n}>" for n in range(100)}
    return {
        "tiktoken": "\n".join(f"{base64.b64encode(rng.randbytes(1 + n % 40)).decode()} {n}" for n in range(2000)),
        "vocab.json": json.dumps(words | {f"password{n}": n for n in range(100_000, 100_100)}),
        "vocab.txt": "\n".join(words) * 3,
        "data.md": f"![x](data:image/png;base64,{drawn})",
        # Of a picture too, whose letters may be anything.
        "data.ipynb": json.dumps({"image/png": f"{drawn}/EAAA{drawn[:90]}/EAAC{drawn[90:400]}+AKCp{drawn[400:]}"}),
        "pointer": f"version https://git-lfs.github.com/spec/v1\noid sha256:{rng.randbytes(32).hex()}\nsize 1234\n",
        "commits.md": "".join(f"- commit {rng.randbytes(20).hex()}, run {rng.randbytes(16).hex()}\n" for _ in words),
        "tokens.json": json.dumps({"bos_token": "<|begin_of_text|>", "EOS_TOKEN": "<|end_of_text_128001|>"} | extra),
        "login.md": f"hf auth login\nexport HF_TOKEN=hf_{34 * 'x'}\nexport HF_TOKEN=<your token>\n"
        "login(token=os.environ['HF_TOKEN'])\nOPENAI_API_KEY=sk-... WANDB_API_KEY=$WANDB_API_KEY\n"
        "client = OpenAI(api_key='YOUR_API_KEY', base_url='http://localhost:8000/v1')\npassword = getpass()\n",
        "links.md": "https://user:password@example.org/x https://github.com/a/b/blob/main/c.py?plain=1#L3 "
        "http://username:token@proxy:8080 https://wandb.ai/org/project/runs/1a2b3c4d s3://bucket/key?versionId=1\n",
        "tool.jinja": "{% if token %}{{ bos_token + 'system_token: ' + message['api_key'] }}{% endif %}",
        # As the Hub signs its own evaluations.
        "results.md": f"  verified: true\n  verifyToken: {'.'.join(signed)}\n",
        "results.json": json.dumps({"verified": True, "verifyToken": ".".join(signed)}),
        "results.jsonl": json.dumps({"verifyToken": ".".join(signed)}, separators=(",", ":")),
        "hash.yaml": f"sha256: {rng.randbytes(32).hex()}\nmd5: {rng.randbytes(16).hex()}\nseed: 1234567890123456\n",
        "variables.md": "https://alice:$TOKEN@nas.acme.com/x https://alice:${TOKEN:-a1}@nas.acme.com "
        "https://a:%TOKEN1%@b.c "
        "https://a:{token1}@b.c https://a:{{token1}}@b.c postgresql://%s:%s@%s/x https://a:%(pass1)s@b.c "
        "password=$DB_PASS1 password: ${DB_PASS1} password: '{{ pass1 }}' password=%DB_PASS1% password: <pass1word>\n"
        "(?i:password|passwd|pwd)[0-9]{6} |password|str|2| $PWD:/work2/x FIRST_PASS=1e-4 two_pass: v2-base-1 "
        "mysql -u root -p models2024 < x.sql; docker run -p 127.0.0.1:8080:80 a1b2c3 "
        "| password | str | must have 8 letters |\n| api_key | str, default=None | of version2 |\n"
        "f(password=None, md5=None) ('password', 'str') ['api_key', 'secret_key'] {'name': 'password', 'value': ''}\n"
        "- name: API_KEY\n  valueFrom:\n    secretKeyRef: {name: keys-of-version2-of-the-app, key: api}\n"
        "api_key: |\n  the key of the service\npassword:    see 1password\nAPI key: `None`, <password></password>\n",
        "code.md": "def f(secret_key: str, access_token=None, password: str | None = None): ...\n"
        "key-value cache, sk-learn, task-oriented-classification-of-sentences, xoxo, pypi-like, dapivirine\n",
    }


def long_secrets() -> dict[str, str]:
    """Secrets that are longer than a part, far from their mark, or at the border of two parts."""
    long, hexadecimal = letters(WORD, 5000), letters(HEX, 40)
    keys = {"keys": [{"kty": "RSA", "x5c": [letters(WORD, 1700), letters(WORD, 1900)], "d": letters(WORD, 342)}]}
    return {
        "web token": f"id_token: eyJ{letters(WORD, 60)}.eyJ{long}.{letters(WORD, 90)}",
        "session token": f"AWS_SESSION_TOKEN={long}",
        "header": f"Authorization: Bearer {long}",
        "auth": json.dumps({"auth": long}),
        "behind data": f"{long}/h" + f"f_{letters(WORD, 34)}",
        "certificates": json.dumps(keys, indent=2),
        "fields between": json.dumps({"username": "a", "about": "y " * 2400, "key": letters(HEX, 32)}),
        **{f"border {gap}": f"login {'y' * gap} wandb login {hexadecimal}" for gap in range(2950, 3050, 9)},
    }


@pytest.mark.parametrize("secret", long_secrets().values(), ids=long_secrets())
def test_secrets_longer_than_a_part_are_found(secret):
    assert list(find_secrets(secret))


def test_parts_about_the_marks_hold_what_the_whole_text_does():
    """A long text is searched in parts; a secret in its middle is found, and its place is that in the whole."""
    filler = "".join(f'"Ġw{n}": {n},\n' for n in range(400_000, 402_000))
    for kind, secret in shapes().items():
        alone = list(find_secrets(f"\n{secret}\n"))
        hidden = [
            match._replace(start=match.start - len(filler)) for match in find_secrets(f"{filler}\n{secret}\n{filler}")
        ]
        assert alone == hidden, kind


def test_no_harmless_file_is_refused(tmp_path):
    files = configurations() | documents() | oddities()
    # SECURITY.md says which.
    assert len(files) >= 700
    found = {name: find(tmp_path, "README.md", text.encode("utf-8", "surrogatepass")) for name, text in files.items()}
    assert {name: (error.line, error.kind) for name, error in found.items() if error is not None} == {}
