"""Secrets of houses and wallets in the forms in which people write them, and what only looks like one."""

from __future__ import annotations

import pytest

from hf_ext.hub.card_rules import read_front_matter
from hf_ext.hub.cards import write_card
from hf_ext.hub.disclosure import find_kind
from tests.hub.secret_corpus import BASE64, DIGITS, HEX, LARGE, NAME, SMALL, WORD, letters

SEED = "abandon ability able about above absent absorb abstract absurd abuse access accident"
ID = f"{letters(HEX, 8)}-{'-'.join([letters(HEX, 4)] * 3)}-{letters(HEX, 12)}"
CODE = "-".join([letters(LARGE + DIGITS, 6)] * 2 + [letters(LARGE + DIGITS, 5)] * 4)
ETHER = "0x" + letters(HEX, 64)
WIF = "L1" + letters("".join(sign for sign in WORD if sign not in "0OIl"), 50)
BYTES = ",".join(str(7 * number % 256) for number in range(64))
SECRETS = [
    *('<Pass encoding="base64">c2VjcmV0MTIzNA==</Pass>', '<Pass encoding="base64">aHVudGVyYWJj</Pass>'),
    *("<Pass>Tr0ub4dor3</Pass>", f"bw list items --session {letters(BASE64, 86)}==", "bw unlock Tr0ub4dor3"),
    *(f"BW_SESSION={letters(BASE64, 86)}==", f"0.{ID}.{letters(WORD, 30)}:{letters(BASE64, 22)}=="),
    *(f"{kind}/{letters(DIGITS, 16)}:{letters(HEX, 32)}" for kind in ("1", f"2/{letters(DIGITS, 16)}")),
    *(f"{name}{ETHER}" for name in ('Account.from_key("', 'new ethers.Wallet("', "wallet_key: ", 'accounts: ["')),
    *(f"wif = {WIF}", f'bitcoin-cli importprivkey "{WIF}"', f"secretKey: [{BYTES}]"),
    *(f'{name}"{SEED}"' for name in ("seed = ", "Account.from_mnemonic(", "wallet: ", "Recovery words: ")),
    *(f"A3-{CODE}", f"v1.0-{letters(HEX, 24)}-{letters(HEX, 146)}", f"PMAT-{letters(LARGE + DIGITS, 26)}"),
    *(f"{kind}{letters(WORD, 40)}{letters(HEX, 8)}" for kind in ("cfk_", "cfut_", "cfat_", "lin_wh_")),
    f"cloudflared service install eyJhIjoi{letters(WORD, 120)}",
    *(f"shp{kind}_{letters(HEX, 32)}" for kind in ("at", "ss", "ua", "tka", "stk")),
    *(f"fig{kind}_{letters(NAME, 40)}" for kind in ("d", "u", "o", "or", "oh")),
    *(f"nf{kind}_{letters(WORD, 36)}" for kind in "pcoub"),
    *(f"vc{kind}_{letters(WORD, 56)}" for kind in "pkiar"),
    *(f"sbp_{kind}{letters(HEX, 40)}" for kind in ("", "oauth_", "v0_")),
    *(f"dp.{kind}.{letters(WORD, 43)}" for kind in ("pt", "sa", "said", "scrt")),
    *(f"fo1_{letters(NAME, 43)}", f"pscale_api_{letters(NAME, 43)}", f"ddapp_{letters(WORD, 34)}"),
    *(f"CLOJARS_{letters(SMALL + DIGITS, 60)}", f"EZTK{letters(WORD, 54)}", f"dG9rO{letters(WORD, 54)}="),
    *(f"eyJrIjoi{letters(WORD, 70)}=", f"sgp_{letters(WORD, 64)}", f"oauth:{letters(SMALL + DIGITS, 30)}"),
    f"pat.{letters(NAME, 22)}.{letters(HEX, 24)}.{letters(WORD, 20)}",
    *(f"mainnet.infura.io/v3/{letters(HEX, 32)}", f"https://eth.g.alchemy.com/v2/{letters(NAME, 32)}"),
    *(f'secret_key_base = "{letters(HEX, 128)}"', f'integration_key = "{letters(HEX, 32)}"'),
    f"PresharedKey = {letters(BASE64, 43)}=",
]
HARMLESS = [
    *("<Pass>12 of 14</Pass>", "<Pass>test_one</Pass>", '<Pass encoding="base64"></Pass>', "bw unlock --help"),
    *("1/2 of 3/4", f"data/1/{letters(HEX, 32)}", f"epoch 1/{letters(DIGITS, 3)}: loss", "2/1200/1200:30"),
    *(f"transaction {ETHER}", f"address: {ETHER}", f'"hash": "{ETHER}"', f"account {ETHER}", f"ids: [{BYTES}]"),
    *("seed = 42", "the seed of a random number", "wallet: a folder of keys", "wallet = Wallet()", "wif: 3"),
    *("A3-B90QD8", "A3-SIZE-PAPER", "v1.0-rc1", "v1.0-9f86d08", "session 0.5", f"0.{ID}", "--session mine"),
    *("cfat_loss", "vca_model", "nfc_reader", "sbp_oauth_flow", "fo1_score", "figo_plot", "pat.shape.dim", "dp.sa.x"),
    *("oauth: see the page", "oauth:authorization", "infura.io/docs", "alchemy.com/v2/guide", "EZTK is a kit"),
    *("integration_key = name", "preshared_key: optional", "secret_key_base: see docs", "secretKey: [1, 2, 3]"),
    *("eyJrIjoi", "dG9rOmFiYw==", f"sgp_{letters(SMALL, 20)}", "accounts: [0x1, 0x2]", "cloudflared tunnel run mine"),
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_found_as_people_write_it(text):
    assert find_kind(f"# Mine\n\n{text}\n") is not None
    assert find_kind(f'{{"note": "{text}"}}') is not None or '"' in text


def test_what_only_looks_like_one_is_not(tmp_path):
    assert [text for text in HARMLESS if find_kind(f"# Mine\n\n{text}\n") is not None] == []


@pytest.mark.parametrize(
    "entry", ["license:", "license: null", "license: ''", '"license": ~', "license: []", "license:   # mine"]
)
@pytest.mark.parametrize("rest", ["", "tags: [a]\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_empty_licence_is_filled_in(tmp_path, entry, rest, end):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_bytes(
        f"---\n{rest}{entry}\n{rest and 'language: en'}\n---\n# Mine\n".replace("\n", end).encode()
    )
    text = write_card(tmp_path, repo_id="org/mine", license="mit").read_bytes().decode()
    found = read_front_matter(text)
    assert found["license"] == "mit" and ("tags" in found) == ("language" in found) == bool(rest)
    assert text.replace("\r", "").endswith("# Mine\n")
