"""What the tasks of a merge can be asked for, and how a batch of requests is answered."""

from __future__ import annotations

import base64
import binascii
import inspect
import itertools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_ext.emr import EMRModel
from hf_ext.emr.building import model_class
from hf_ext.restoration.encoding import Frames, encode_frames, to_8_bits
from hf_ext.restoration.files import read_image
from hf_ext.restoration.tiles import restore_image
from hf_ext.semanir.image_processing_semanir import pixels_to_image

from .worker import Job

# Tokens of a text where neither model nor tokenizer has a limit.
_LONGEST = 2**16
# Settings of generation that look at the tokens of a prompt, its padding too, and where they do nothing.
_COUNTING = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
}
_READERS: dict[str, Any] = {"Sequence": AutoTokenizer, "Image": AutoImageProcessor, "Audio": AutoFeatureExtractor}
_MEGAPIXELS = 50.0
_ALONE = itertools.count()


class ServedTask:
    """
    A task of a merge, with what turns a request into the input of its model.

    `kind` is `"classification"`, `"generation"` or `"restoration"`; any other model is refused by a `ValueError`.
    """

    def __init__(self, emr: EMRModel, name: str) -> None:
        self.name = name
        files = emr.weights.small_files(name)
        if emr.weights.manifest.library != "transformers":
            raise ValueError(
                f"task {name!r} is of {emr.weights.manifest.library}; only transformers models are served"
            )
        with tempfile.TemporaryDirectory() as place:
            for file, path in files.items():
                shutil.copyfile(path, Path(place, file))
            self.config: Any = AutoConfig.from_pretrained(place)
            found: Any = model_class(self.config, Path(place), False)
            self.reads, ends, _ = found.__name__.rpartition("For")[2].partition("Classification")
            if self.config.model_type == "semanir":
                self.kind = "restoration"
            elif ends and self.reads in _READERS:
                self.kind = "classification"
            elif found.can_generate():
                self.kind, self.reads = "generation", "Sequence"
                self._set_generation(place, found)
            else:
                raise ValueError(
                    f"task {name!r} is a {found.__name__}, which neither classifies, generates nor restores"
                )
            self.reader: Any = None if self.kind == "restoration" else self._load_reader(place)
        if self.reads == "Sequence":
            text = self.config.get_text_config()
            limits = [getattr(text, key, None) for key in ("max_position_embeddings", "n_positions")]
            limits.append(getattr(self.reader, "model_max_length", None))
            self.limit = min([limit for limit in limits if isinstance(limit, int)] + [_LONGEST])
            # Tasks that read other tokens, or fewer, share no batch.
            self.vocabulary = getattr(text, "vocab_size", None), self.limit

    def _set_generation(self, place: str, found: Any) -> None:
        has_own = Path(place, "generation_config.json").is_file()
        config = (
            GenerationConfig.from_pretrained(place) if has_own else GenerationConfig.from_model_config(self.config)
        )
        ends = config.eos_token_id
        self.ends: list[Any] = ends if isinstance(ends, list) else [ends]
        self.padding = config.pad_token_id if config.pad_token_id is not None else (self.ends[0] or 0)
        # Padding before a prompt shifts it, where the model is not told the positions.
        takes = inspect.signature(found.forward).parameters
        counts = any(getattr(config, key, None) not in (None, idle) for key, idle in _COUNTING.items())
        told = self.config.is_encoder_decoder or "position_ids" in takes
        self.pads = "attention_mask" in takes and told and not counts

    def _load_reader(self, place: str) -> Any:
        what = "tokenizer" if self.reads == "Sequence" else f"{self.reads.lower()} processor"
        # Of nothing but a configuration, transformers makes a tokenizer that knows no word.
        names = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
        try:
            if any(Path(place, name).is_file() for name in names):
                return _READERS[self.reads].from_pretrained(place)
            why = f"none of {', '.join(names)} is there"
        except Exception as error:
            # Libraries of many kinds read these files, and raise what they like: tokenizers a plain Exception.
            why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"task {self.name!r} has no {what} ({why}); put its files beside the artifact's emr.json")

    def encode(self, given: Any) -> dict[str, Any]:
        """The input of a classifier for one sample: lists of a text, tensors of anything else."""
        if self.reads == "Audio":
            rate = self.reader.sampling_rate
            if not isinstance(given, list) or not given:
                raise ValueError(
                    f"task {self.name!r} classifies sounds: `input` is a list of numbers, sampled at {rate} Hz"
                )
            sound = torch.tensor(given)
            if not sound.isfinite().all():
                raise ValueError("`input` holds numbers that are too large for a sound")
            return dict(self.reader([sound.numpy()], sampling_rate=rate, return_tensors="pt"))
        if not isinstance(given, str) or not given:
            what = "texts" if self.reads == "Sequence" else "pictures"
            raise ValueError(
                f"task {self.name!r} classifies {what}: `input` is a string, or a list of them; none empty"
            )
        if self.reads == "Image":
            grey = getattr(self.config, "num_channels", 3) == 1
            return dict(self.reader([decode_picture(given).convert("L" if grey else "RGB")], return_tensors="pt"))
        check_unicode(given)
        found = self.reader(given)
        self.check_length(len(found["input_ids"]))
        return dict(found)

    def encode_prompt(self, text: str | list[dict[str, str]]) -> list[int]:
        """The tokens of a prompt, or of a chat."""
        for part in [text] if isinstance(text, str) else [message["content"] for message in text]:
            check_unicode(part)
        if isinstance(text, str):
            tokens = self.reader(text)["input_ids"]
        elif getattr(self.reader, "chat_template", None):
            try:
                tokens = self.reader.apply_chat_template(text, add_generation_prompt=True)["input_ids"]
            except Exception as error:
                # The template is a program of whoever made the model, and refuses orders of roles, for instance.
                raise ValueError(f"the chat template of task {self.name!r} refuses these messages: {error}") from error
        else:
            raise ValueError(f"task {self.name!r} has no chat template; ask /v1/completions instead")
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        self.check_length(len(tokens))
        return [int(token) for token in tokens]

    def check_length(self, tokens: int, more: int = 0) -> None:
        """Refuses what is longer than the model reads."""
        if tokens + more > self.limit:
            asked = f"{tokens} tokens" + (f" and {more} to generate" if more else "")
            raise ValueError(f"the input has {asked}; task {self.name!r} takes at most {self.limit}: shorten it")

    def classification_job(self, given: Any) -> Job:
        """A request to classify one sample; those whose inputs have one form are answered together."""
        inputs = self.encode(given)
        if self.reads != "Sequence":
            form: Any = tuple((key, tuple(value.shape), value.dtype) for key, value in sorted(inputs.items()))
        elif self._pads_inputs(inputs):
            form = tuple(inputs), self.vocabulary, "padded", self.reader.pad_token_id
        else:
            form = tuple(inputs), self.vocabulary, "of length", len(inputs["input_ids"])
        return Job(self, classify, inputs, (classify, form))

    def _pads_inputs(self, inputs: dict[str, Any]) -> bool:
        """Whether padding changes no answer: masked, after the text, and of the token that the model takes for it."""
        padding = self.reader.pad_token_id
        known = padding is not None and padding == getattr(self.config.get_text_config(), "pad_token_id", None)
        return known and "attention_mask" in inputs and self.reader.padding_side == "right"

    def join(self, inputs: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """One batch of several inputs of one form."""
        if self.reads != "Sequence":
            return {key: torch.cat([one[key] for one in inputs]) for key in inputs[0]}
        longest = max(len(one["input_ids"]) for one in inputs)
        inputs = [{key: self._pad(key, row, longest) for key, row in one.items()} for one in inputs]
        return {key: torch.tensor([one[key] for one in inputs]) for key in inputs[0]}

    def _pad(self, key: str, row: list[int], length: int) -> list[int]:
        filler = {"input_ids": self.reader.pad_token_id, "token_type_ids": self.reader.pad_token_type_id}.get(key, 0)
        return [*row, *[filler] * (length - len(row))]

    def generation_job(self, tokens: list[int], streamer: Any = None, **options: Any) -> Job:
        """A request to generate; prompts of any tasks with the same options go together."""
        room = 0 if self.config.is_encoder_decoder else options["max_tokens"]
        self.check_length(len(tokens), room)
        if self.config.is_encoder_decoder and hasattr(self.config, "max_position_embeddings"):
            self.check_length(1, options["max_tokens"])
        alone = next(_ALONE) if streamer is not None or options.get("seed") is not None else None
        # What a text must not hold is looked for by the task's tokenizer.
        own = self.name if options["stop"] else self.config.is_encoder_decoder
        inputs = {"tokens": tokens, "options": options, "streamer": streamer}
        length = None if self.pads else len(tokens)
        return Job(
            self, generate, inputs, (generate, own, self.vocabulary, self.padding, length, repr(options), alone)
        )

    def restoration_job(self, data: bytes) -> Job:
        """A request to restore a picture."""
        return Job(self, restore, data, (restore, next(_ALONE)))


def check_unicode(text: str) -> None:
    """Refuses half a surrogate pair, which JSON can hold and no tokenizer takes."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("the text holds half a surrogate pair; send valid Unicode")


def decode_picture(text: str) -> Image.Image:
    """A picture of 8 bits from base64, with or without `data:…,` before it."""
    try:
        data = base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"`input` is no base64 of a picture file ({error})") from error
    return pixels_to_image(to_8_bits(read_image(data, _MEGAPIXELS).pixels))


@torch.no_grad()
def classify(emr: EMRModel, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One forward for samples of any tasks."""
    joined = jobs[0].task.join([job.inputs for job in jobs])
    batch = {key: value.to(emr.model.device) for key, value in joined.items()}
    logits = emr(**batch, task_ids=[job.task.name for job in jobs]).logits
    return [describe_class(job.task.config, row.float().cpu()) for job, row in zip(jobs, logits, strict=True)]


def describe_class(config: Any, logits: torch.Tensor) -> dict[str, Any]:
    """The answer for one sample, in the form of vLLM's /classify."""
    if not logits.isfinite().all():
        raise RuntimeError("the model gives logits that are infinite or no number")
    count = len(logits)
    if config.problem_type == "multi_label_classification":
        probabilities = logits.sigmoid()
    else:
        # One number is a regression.
        probabilities = logits.softmax(-1) if count > 1 else logits
    label = config.id2label.get(int(probabilities.argmax()))
    return {"label": label, "probs": probabilities.tolist(), "num_classes": count}


@torch.no_grad()
def generate(emr: EMRModel, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Continuations of prompts of any tasks."""
    first, options = jobs[0].task, jobs[0].inputs["options"]
    tokens, mask = join_prompts([job.inputs["tokens"] for job in jobs], first.config.is_encoder_decoder, first.padding)
    # Below this a probability is divided by nothing.
    how: dict[str, Any] = {"do_sample": options["temperature"] >= 1e-3, "max_new_tokens": options["max_tokens"]}
    # Whatever the model's own settings are.
    how |= {"num_return_sequences": 1, "return_dict_in_generate": False, "pad_token_id": first.padding}
    if how["do_sample"]:
        how |= {"temperature": options["temperature"], "top_p": options["top_p"], "top_k": 0}
    # An encoder-decoder's begins with the token that starts every one.
    start = 1 if first.config.is_encoder_decoder else tokens.shape[1]
    how["stopping_criteria"] = StoppingCriteriaList([_Left(jobs)])
    if options["stop"]:
        how["stopping_criteria"].append(_Stop(first, options["stop"], start))
    with torch.random.fork_rng(enabled=options["seed"] is not None):
        if options["seed"] is not None:
            torch.manual_seed(options["seed"])
        out = emr.generate(
            tokens.to(emr.device),
            attention_mask=mask.to(emr.device),
            task_ids=[job.task.name for job in jobs],
            streamer=jobs[0].inputs["streamer"],
            **how,
        )
    return [describe_text(job, row[start:].tolist()) for job, row in zip(jobs, out, strict=True)]


def join_prompts(prompts: Sequence[list[int]], at_the_end: bool, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of several prompts, padded at one side, and where they are not."""
    longest = max(map(len, prompts))
    rows = []
    for prompt in prompts:
        more = [padding] * (longest - len(prompt))
        row = [(token, 1) for token in prompt]
        rows.append(row + [(token, 0) for token in more] if at_the_end else [(token, 0) for token in more] + row)
    tokens, mask = torch.tensor(rows).unbind(-1)
    return tokens.contiguous(), mask.contiguous()


class _Left(StoppingCriteria):
    """Ends all continuations once nobody waits for any of them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
        return torch.full(input_ids.shape[:1], all(job.left.is_set() for job in self._jobs), device=input_ids.device)


class _Stop(StoppingCriteria):
    """Ends a continuation whose text has one of some strings; transformers' own needs tokens that spell."""

    def __init__(self, task: ServedTask, stop: list[str], start: int) -> None:
        self._task, self._stop, self._start = task, stop, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
        texts = [self._task.reader.decode(row[self._start :], skip_special_tokens=True) for row in input_ids]
        done = [any(part in text for part in self._stop) for text in texts]
        return torch.tensor(done, device=input_ids.device)


def describe_text(job: Job, tokens: list[int]) -> dict[str, Any]:
    """The text of a continuation, up to its end, and why it ended there."""
    task, stop = job.task, job.inputs["options"]["stop"]
    first_end = next((place for place, token in enumerate(tokens) if token in task.ends), None)
    tokens = tokens if first_end is None else tokens[: first_end + 1]
    text = task.reader.decode(tokens, skip_special_tokens=True)
    cuts = [place for place in (text.find(part) for part in stop) if place >= 0]
    text = text[: min(cuts)] if cuts else text
    why = "stop" if cuts or first_end is not None else "length"
    prompt = len(job.inputs["tokens"])
    return {"text": text, "finish_reason": why, "prompt_tokens": prompt, "completion_tokens": len(tokens)}


def restore(emr: EMRModel, jobs: Sequence[Job]) -> list[bytes]:
    """Restored pictures as PNG files, one after the other."""
    answers = []
    for job in jobs:
        picture = read_image(job.inputs, _MEGAPIXELS)
        with emr.task(job.task.name) as model:
            pixels = restore_image(model, picture.pixels, tile="auto", progress=job.check)
        answers.append(encode_frames(Frames([picture._replace(pixels=pixels)]), "PNG"))
    return answers
