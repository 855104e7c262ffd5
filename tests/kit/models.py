"""Shared code of every method's tests: mixins that check a model class, comparison of fast with textbook operators.

A test class inherits the mixins it needs and gives `model_class`, `make_config` and `make_inputs` for a tiny model.
"""

import contextlib
import inspect
import resource
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import peft
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import Trainer, TrainingArguments

# Of the largest value. Weights are compared bit for bit, what two copies of a model make of them is not: kernels add
# in another order where memory is aligned otherwise, and a file's tensors lie wherever its header ends. On an AMD EPYC
# processor with AVX-512 two copies of a network differed by 3.6e-7.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@contextlib.contextmanager
def file_limit(size: int, kind: int = resource.RLIMIT_FSIZE) -> Iterator[None]:
    """No file of this process may be written beyond that; or another limit."""
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)


def assert_same_answers(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Outputs of two copies of a model, or of one in two places, are the same but for the order of sums."""
    atol = TOLERANCES[expected.dtype] * float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}")


def assert_same_gradients(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """
    Gradients of two copies of a model are the same but for the order of sums.

    The measure is the largest gradient of the whole model. That of a single tensor may be zero in exact arithmetic, as
    a bias before a normalisation has it: it is then what is left of large numbers that cancel, which is rounding of
    *their* size, and another on every processor. No fraction of its own size would bound it.
    """
    largest = max(float(value.abs().max()) for value in expected)
    assert largest > 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCES[theirs.dtype] * largest)


def assert_same_picture(found: np.ndarray, expected: np.ndarray) -> None:
    """Pictures of whole numbers that two copies of a model made: a value in a hundred may be rounded the other way."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    difference = np.abs(found.astype(int) - expected.astype(int))
    assert difference.max() <= 1 and (difference > 0).mean() <= 0.01


def assert_same_weights(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """All that two models save is equal bit for bit."""
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    different = [name for name, value in theirs.items() if not torch.equal(ours[name], value)]
    assert not different


class ModelTester:
    """The tiny model under test. Inputs are made anew by each call, from a fixed seed, and have labels."""

    model_class: type[Any]
    # Absolute difference allowed between bfloat16 and float32 outputs.
    bfloat16_tolerance: float

    def make_model(self) -> Any:
        """The model with every parameter moved from its initial value, so that constants are noticed too."""
        torch.manual_seed(0)
        model = self.model_class(self.make_config())
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        return model.eval()

    def main_output(self, outputs: Any) -> torch.Tensor:
        """The model's result: the first output that is not the loss."""
        return next(value for name, value in outputs.items() if name != "loss")

    def predict(self, model: Any, **changes: Any) -> torch.Tensor:
        with torch.no_grad():
            return self.main_output(model(**{**self.make_inputs(), **changes}))


class ModelTesterMixin(ModelTester):
    def test_same_seed_gives_same_model_and_same_outputs(self):
        first, second = self.make_model(), self.make_model()
        assert_same_weights(first, second)
        assert_same_answers(self.predict(first), self.predict(first))
        assert_same_answers(self.predict(second), self.predict(first))

    def test_saved_model_loads_with_equal_weights(self, tmp_path):
        model = self.make_model()
        model.save_pretrained(tmp_path)
        loaded, report = self.model_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        found, expected = ({name: value.dtype for name, value in one.named_buffers()} for one in (loaded, model))
        assert found == expected
        assert_same_weights(loaded, model)
        assert_same_answers(self.predict(loaded), self.predict(model))

    def test_every_parameter_gets_a_gradient(self):
        model = self.make_model().train()
        model(**self.make_inputs()).loss.backward()
        without = [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]
        assert not without

    def test_activation_checkpointing_changes_neither_loss_nor_gradients(self):
        losses, gradients = [], []
        for checkpointing in (False, True):
            model = self.make_model().train()
            if checkpointing:
                model.activation_checkpointing_enable()
                assert model.is_activation_checkpointing
            loss = model(**self.make_inputs()).loss
            loss.backward()
            losses.append(loss)
            gradients.append([parameter.grad for parameter in model.parameters()])
        assert_same_answers(losses[1], losses[0])
        assert_same_gradients(gradients[1], gradients[0])

    def test_bfloat16_is_finite_and_near_float32(self, tmp_path):
        model = self.make_model()
        model.save_pretrained(tmp_path)
        halved = self.model_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in halved.parameters()} == {torch.bfloat16}
        output = self.predict(halved)
        assert output.isfinite().all()
        torch.testing.assert_close(output.float(), self.predict(model), atol=self.bfloat16_tolerance, rtol=0)
        loss = halved.train()(**self.make_inputs()).loss
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(parameter.grad.isfinite().all() for parameter in halved.parameters())

    def test_autocast_is_near_float32(self):
        model = self.make_model()
        expected = self.predict(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = self.predict(model)
        torch.testing.assert_close(output.float(), expected, atol=self.bfloat16_tolerance, rtol=0)

    def test_tuple_output_has_the_values_of_the_named_output(self):
        model = self.make_model()
        with torch.no_grad():
            named, plain = model(**self.make_inputs()), model(**self.make_inputs(), return_dict=False)
        assert isinstance(plain, tuple)
        for found, expected in zip(plain, named.to_tuple(), strict=True):
            assert_same_answers(found, expected)


class TrainerTesterMixin(ModelTester):
    """Training by `transformers.Trainer`: the model returns a loss when it gets labels."""

    trainer_steps = 20
    trainer_learning_rate = 5e-3

    def test_trains_under_transformers_trainer(self, tmp_path):
        torch.manual_seed(0)
        model = self.model_class(self.make_config())
        # The samples of one batch, over and over.
        names, values = zip(*self.make_inputs().items(), strict=True)
        data = [dict(zip(names, sample, strict=True)) for sample in zip(*values, strict=True)]
        options = {"max_steps": self.trainer_steps, "learning_rate": self.trainer_learning_rate, "logging_steps": 1}
        options |= {"per_device_train_batch_size": len(data), "save_strategy": "no", "report_to": [], "use_cpu": True}
        arguments = TrainingArguments(str(tmp_path), disable_tqdm=True, dataloader_pin_memory=False, **options)
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == self.trainer_steps
        assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses

    def test_steps_that_are_accumulated_add_up_to_one_batch(self, tmp_path):
        torch.manual_seed(0)
        model, inputs = self.model_class(self.make_config()), self.make_inputs()
        options = {"gradient_accumulation_steps": 2, "report_to": [], "use_cpu": True}
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=[inputs])
        trainer.current_gradient_accumulation_steps = 2
        batches, count = trainer.get_batch_samples(iter([inputs, inputs]), 2, torch.device("cpu"))
        found = sum(trainer.training_step(model, dict(batch), count) for batch in batches)
        torch.testing.assert_close(found, model(**inputs).loss.detach(), atol=1e-5, rtol=1e-5)


class LoraTesterMixin(ModelTester):
    """Adapters by peft, trained as Trainer and the package's loop train: in training mode."""

    lora_targets: list[str]

    # peft still asks for the name that transformers deprecates.
    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
    def test_lora_trains_saves_and_loads(self, tmp_path):
        base = self.make_model()
        expected = self.predict(base)
        torch.manual_seed(0)
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=self.lora_targets))
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert trained and all("lora_" in name for name in trained)
        assert_same_answers(self.predict(model), expected)
        # An adapter is saved without the buffers of its base: one that moves in training is lost.
        buffers = {name: value.clone() for name, value in model.named_buffers()}

        # Steps of one size, however small the gradients of a tiny model are.
        optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], lr=0.1)
        # The second factor starts at zero, so the first gets a gradient from the second step on.
        model.train()
        for _ in range(5):
            optimizer.zero_grad()
            model(**self.make_inputs()).loss.backward()
            optimizer.step()
        moved = [name for name, value in model.named_buffers() if not torch.equal(value, buffers[name])]
        assert not moved
        adapted = self.predict(model.eval())
        assert not torch.allclose(adapted, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))

        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(self.make_model(), tmp_path)
        assert_same_weights(loaded, model)
        assert_same_answers(self.predict(loaded), adapted)
        torch.testing.assert_close(self.predict(loaded.merge_and_unload()), adapted, atol=1e-5, rtol=1e-5)


class ConfigTesterMixin:
    """A configuration survives the disk and refuses what makes no model."""

    config_class: type[Any]
    # Fields that change from their defaults together, and (fields, words of the message) that are refused.
    config_changes: dict[str, Any]
    bad_configs: list[tuple[dict[str, Any], str]]

    def test_config_survives_saving(self, tmp_path):
        config = self.config_class(**self.config_changes)
        config.save_pretrained(tmp_path)
        loaded = self.config_class.from_pretrained(tmp_path)
        assert loaded.to_dict() == config.to_dict()
        for name, value in self.config_changes.items():
            assert value != getattr(self.config_class(), name), f"{name} is not changed by the test"
            assert getattr(loaded, name) == value

    def test_bad_configs_are_refused_with_the_reason(self):
        for fields, words in self.bad_configs:
            with pytest.raises(StrictDataclassError) as error:
                self.config_class(**fields)
            assert words in str(error.value), (fields, str(error.value))


Function = Callable[..., Any]


def operator_pairs(ops: ModuleType, reference: ModuleType) -> dict[str, tuple[Function, Function]]:
    """Public functions of an `ops_x` module with those of `reference_x`, which have the same names and signatures."""

    def public_functions(module: ModuleType) -> dict[str, Function]:
        members = inspect.getmembers(module, inspect.isfunction)
        return {name: f for name, f in members if f.__module__ == module.__name__ and not name.startswith("_")}

    fast, plain = public_functions(ops), public_functions(reference)
    assert fast.keys() == plain.keys()
    for name in fast:
        assert inspect.signature(fast[name]) == inspect.signature(plain[name]), name
    return {name: (fast[name], plain[name]) for name in fast}


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cast(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.detach().to(dtype).requires_grad_(value.requires_grad) if _is_real(value) else value
        for name, value in arguments.items()
    }


def _run(function: Function, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors of the result and, of everything differentiable, the gradients for one fixed cotangent."""
    result = function(**arguments)
    values = result if isinstance(result, tuple) else (result,)
    results = [value for value in values if isinstance(value, torch.Tensor)]
    differentiable = [result for result in results if result.requires_grad]
    if not differentiable:
        return results
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in differentiable]
    cotangents = [cotangent.to(one.dtype) for cotangent, one in zip(cotangents, differentiable, strict=True)]
    inputs = [value for value in arguments.values() if _is_real(value) and value.requires_grad]
    gradients = torch.autograd.grad(differentiable, inputs, cotangents, allow_unused=True)
    return results + [torch.zeros(()) if gradient is None else gradient for gradient in gradients]


def assert_operators_agree(fast: Function, plain: Function, arguments: dict, dtype: torch.dtype, tolerance: float):
    """
    Compares results and all gradients of a fast operator in `dtype` with the textbook one in float64. Both get the
    float64 arguments rounded to `dtype`. The tolerance is absolute, and relative to the largest value of each tensor
    if that is above 1; integers and booleans must be equal.
    """
    rounded = _cast(arguments, dtype)
    results, expected = _run(fast, rounded), _run(plain, _cast(rounded, torch.float64))
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.shape == wanted.shape
        finite = wanted[wanted.isfinite()].double().abs()
        scale = max(1.0, finite.max().item()) if finite.numel() else 1.0
        allowed = tolerance * scale if wanted.is_floating_point() else 0
        torch.testing.assert_close(result.double(), wanted.double(), atol=allowed, rtol=0)
