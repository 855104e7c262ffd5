"""The search for secrets against a corpus: every known shape in every place, and files that are harmless."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
from importlib.metadata import distribution
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from transformers import CONFIG_MAPPING

from .secret_corpus import DISGUISES, PLACES, shapes
from .secret_scores import PAGE, find, find_all, write_page

ROOT = Path(__file__).parents[2]


def test_at_least_95_of_100_secrets_are_refused_in_every_place(tmp_path):
    made, answers = shapes(), find_all(tmp_path)
    assert len(made) >= 120 and len(set(made.values())) == len(made)
    missed = [pair for pair, error in answers.items() if error is None and pair[1] in PLACES]
    assert len(missed) <= 0.05 * len(made) * len(PLACES), missed
    # And none is missed where it stands as it is.
    assert not [kind for kind, place in missed if place in ("a card", "a string of JSON")]
    for (kind, place), error in answers.items():
        if error is not None:
            text = made[kind]
            assert error.file == (PLACES | DISGUISES)[place](text)[0] and error.kind
            # Nothing that is secret is in the message: no long word of it.
            assert not any(word in str(error) for word in text.split() if len(word) > 12 and word.isalnum())
    assert PAGE.read_text(encoding="utf-8") == write_page(answers), "python -m tests.hub.secret_scores writes it anew"


def configurations() -> dict[str, str]:
    """The configurations of a third of transformers' models, as they are published."""
    made = {}
    for name in sorted(CONFIG_MAPPING)[::3]:
        # Some are of several models and have no default, or refuse their own.
        with contextlib.suppress(ValueError, TypeError, AttributeError, ImportError, StrictDataclassError):
            made[f"{name}.json"] = CONFIG_MAPPING[name]().to_json_string()
    return made


def documents() -> dict[str, str]:
    """Cards, notebooks, results and recipes of this repository, and those of the packages that we need."""
    kinds = (".md", ".json", ".yaml", ".ipynb", ".txt", ".toml", ".jinja")
    found = {}
    for folder in ("docs", "model_cards", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in kinds and path.is_file():
                found[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
    for name in (
        "transformers",
        "diffusers",
        "peft",
        "accelerate",
        "datasets",
        "evaluate",
        "huggingface-hub",
        "click",
    ):
        for file in distribution(name).files or ():
            if file.suffix in (".md", ".txt", ".json", ".yaml") or file.name in ("METADATA", "LICENSE", "RECORD"):
                found[str(file)] = Path(str(file.locate())).read_text(encoding="utf-8")
    return found


def oddities() -> dict[str, str]:
    """Beginnings, placeholders and random letters that stand in public repositories and open nothing."""
    rng = random.Random(0)
    picture = io.BytesIO()
    Image.frombytes("RGB", (32, 32), rng.randbytes(32 * 32 * 3)).save(picture, "PNG")
    words = {
        word: index for index, word in enumerate(("the", "Ġpassword", "token", "sk", "-", "hf", "_", "secret", "key"))
    }
    return {
        "tiktoken": "\n".join(f"{base64.b64encode(rng.randbytes(1 + n % 40)).decode()} {n}" for n in range(2000)),
        "vocab.json": json.dumps(words | {f"password{n}": n for n in range(100_000, 100_100)}),
        "vocab.txt": "\n".join(words) * 3,
        "data.md": f"![x](data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()})",
        "pointer": f"version https://git-lfs.github.com/spec/v1\noid sha256:{rng.randbytes(32).hex()}\nsize 1234\n",
        "commits.md": "\n".join(
            f"- commit {rng.randbytes(20).hex()}, run {rng.randbytes(16).hex()}" for _ in range(50)
        ),
        "tokens.json": json.dumps(
            {"bos_token": "<|begin_of_text|>", "EOS_TOKEN": "<|end_of_text_128001|>", "mask_token_id": 103}
            | {f"extra_id_{n}": f"<extra_id_{n}>" for n in range(100)}
        ),
        "login.md": f"hf auth login\nexport HF_TOKEN=hf_{34 * 'x'}\nexport HF_TOKEN=<your token>\n"
        "login(token=os.environ['HF_TOKEN'])\nOPENAI_API_KEY=sk-... WANDB_API_KEY=$WANDB_API_KEY\n"
        "client = OpenAI(api_key='YOUR_API_KEY', base_url='http://localhost:8000/v1')\npassword = getpass()\n",
        "links.md": "https://user:password@example.org/x https://github.com/a/b/blob/main/c.py?plain=1#L3 "
        "http://username:token@proxy:8080 https://wandb.ai/org/project/runs/1a2b3c4d s3://bucket/key?versionId=1\n",
        "tool.jinja": "{% if token %}{{ bos_token + 'system_token: ' + message['api_key'] }}{% endif %}",
        "hash.yaml": f"sha256: {rng.randbytes(32).hex()}\nmd5: {rng.randbytes(16).hex()}\nseed: 1234567890123456\n",
        "code.md": "def f(secret_key: str, access_token=None, password: str | None = None): ...\n"
        "key-value cache, sk-learn, task-oriented-classification-of-sentences, xoxo, pypi-like, dapivirine\n",
    }


def test_no_harmless_file_is_refused(tmp_path):
    files = configurations() | documents() | oddities()
    assert len(files) >= 300
    taken = {
        name: (error.line, error.kind)
        for name, text in files.items()
        if (error := find(tmp_path, "README.md", text.encode("utf-8", "surrogatepass"))) is not None
    }
    assert taken == {}
