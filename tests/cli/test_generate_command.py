"""hf-ext generate, texts as they come of an MRConv and of a model of transformers."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_ext.answers.continuing import continue_text, load_language_model
from hf_ext.errors import UsageError
from hf_ext.mrconv import MRConvConfig, MRConvForCausalLM
from hf_ext.tasks.texts import LanguageModelTask, byte_tokenizer
from tests.emr.emr_testing import tiny_semanir
from tests.kit import command_line
from tests.kit.refusals import refused

run = partial(command_line.run, "generate")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("writer")
    tokenizer = LanguageModelTask(max_length=32).tokenizer
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "kernel_size": 4, "max_position_embeddings": 32}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = MRConvConfig(**sizes, **ends, vocab_size=len(tokenizer), bidirectional=False)
    MRConvForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_likeliest_text_is_that_of_generate(model):
    said = run(model, "The ", "--temperature", 0, "--max-new-tokens", 40).stdout
    network, tokenizer = load_language_model(str(model), "cpu")
    tokens = tokenizer("The ", return_tensors="pt").input_ids
    found = network.generate(tokens, max_new_tokens=40, do_sample=False)[0]
    assert said == tokenizer.decode(found, skip_special_tokens=True) + "\n"
    assert said.startswith("The ") and len(said) > 5
    assert run(model, "-", "--temperature", 1e-45, "--max-new-tokens", 40, given="The \n").stdout == said


def test_a_seed_says_the_text(model):
    words = (model, "The ", "--max-new-tokens", 30, "--temperature", 1.5)
    first, again, other = (run(*words, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other
    assert run(*words, "--seed", 1, "--top-p", 0.1).stdout != first


def test_the_text_comes_in_parts(model):
    network, tokenizer = load_language_model(str(model), "cpu")
    parts: list[str] = []
    # A model that learned nothing may end its text at once.
    network.generation_config.eos_token_id = None
    continue_text(network, tokenizer, "a b c d ", parts.append, max_new_tokens=600, temperature=1.0, seed=3)
    assert parts[0] == "a b c d " and len([part for part in parts if part]) > 2


def test_the_end_of_a_prompt_is_not_the_end_of_its_text(model, tmp_path):
    network, _ = load_language_model(str(model), "cpu")
    network.save_pretrained(tmp_path)
    # Of a classifier: it ends every text.
    byte_tokenizer(32).save_pretrained(tmp_path)
    words = ("The ", "--temperature", 0, "--max-new-tokens", 8)
    assert run(tmp_path, *words).stdout == run(model, *words).stdout


def test_no_more_tokens_are_asked_for_than_the_model_takes(tmp_path):
    folder, tokenizer = tmp_path / "gpt2", byte_tokenizer(16)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=16, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    LanguageModelTask(max_length=16).tokenizer.save_pretrained(folder)
    assert "4 tokens, and 200 more are requested; the model takes 16: give --max-new-tokens 12 or less" in (
        run(folder, "The ", code=2).stderr
    )
    assert "give a shorter text" in run(folder, "The list is long, longer", code=2).stderr
    assert run(folder, "The ", "--max-new-tokens", 12).stdout.startswith("The ")


def test_other_models_and_values_are_refused_in_words(model, tmp_path):
    restorer = tiny_semanir(tmp_path / "restorer")
    for words, said in (
        ((restorer, "a"), "is not a causal language model (SemanIRForImageRestoration)"),
        ((model, ""), "the text has no tokens: give"),
        ((model, "a", "--temperature", "nan"), "temperature is nan"),
        ((model, "a", "--top-p", 0), "is not in the range"),
        ((model, "a", "--top-p", "nan"), "top_p is nan"),
        ((model, "a", "--seed", 2**32), "is not in the range"),
        ((model, "a\udcff"), "half a surrogate pair"),
        ((model, "a", "--task", "a"), "has no task 'a'"),
    ):
        assert said in run(*words, code=2).stderr
    with refused(UsageError, "temperature"):
        continue_text(AutoModelForCausalLM, None, "a", print, temperature=-1.0)
