"""Settings of `hf-ext dit precompute`, whose options are made from them: light to import."""

from dataclasses import dataclass, field
from typing import Literal

from huggingface_hub.dataclasses import strict

from hf_ext.data.source import DataSource
from hf_ext.settings import build

from .checks import require


@strict
@dataclass
class Precompute:
    """
    Settings that determine the latents.

    Args:
        data (`dict`): The pictures, a [`~hf_ext.training.arguments.DataSource`]; local tar files, and tar and
            parquet files of the Hub, are read as they are.
        vae (`str`): Autoencoder of diffusers: folder or `org/name[@revision]`.
        image_size (`int`): Side of the encoded square in pixels; buckets have the same area.
        crops (`dict`): See [`Crops`].
        max_ratio (`float`, defaults to 1.0): Largest ratio of the sides; above 1, pictures are sorted into buckets.
        bucket_step (`int`, defaults to 64): Number of pixels of which the sides of buckets are multiples.
        seed (`int`, defaults to 0): Seed of the crops.
        batch_size (`int`, defaults to 8): Pictures that are encoded at once.
        shard_size (`int`, defaults to 1000): Rows per file; of a file that is streamed, the latents are one file.
        format (`"parquet"` or `"tar"`, defaults to `"parquet"`):
            Format of the files; in the tar files of webdataset, classes are numbers without names.
        image_column (`str`, defaults to `"image"`): Column of the pictures, or the only one; the others are kept.
        posterior (`bool`, defaults to `False`): Write mean and standard deviation of each latent, in twice the space,
            so that a training with `task.posterior` draws a new one in every step.
        text_encoder (`str`, *optional*): Text encoder of transformers, folder or `org/name[@revision]`, whose hidden
            states of the captions are written; a training then does not run it.
        text_column (`list[str]`): Column of captions, or of lists of captions; `text` if not given.
        max_text_length (`int`, defaults to 77): Largest number of tokens of a caption.
        dtype (`"float32"`, `"bfloat16"` or `"float16"`, defaults to `"float32"`): Precision of the autoencoder.
        workers (`int`, defaults to 4): Threads that decode and cut pictures while others are encoded.
        max_bad_examples (`float`, defaults to 0.001):
            Largest share of unusable pictures: broken, of 16 bits, CMYK, far too small or too long. They are skipped
            and listed in `bad_examples.jsonl` with their reasons. Transparent pictures get a white background.
    """

    data: dict
    vae: str
    image_size: int
    crops: dict = field(default_factory=dict)
    max_ratio: float = 1.0
    bucket_step: int = 64
    seed: int = 0
    batch_size: int = 8
    shard_size: int = 1000
    format: Literal["parquet", "tar"] = "parquet"
    image_column: str = "image"
    posterior: bool = False
    text_encoder: str | None = None
    text_column: list[str] = field(default_factory=lambda: ["text"])
    max_text_length: int = 77
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    workers: int = 4
    max_bad_examples: float = 0.001

    def __post_init__(self) -> None:
        from .diffusion_data import Crops, Size, bucket_sizes

        self.source = build(DataSource, self.data, "data")
        self.how = build(Crops, self.crops, "crops")
        self.buckets: list[Size] = [(self.image_size, self.image_size)]
        if self.max_ratio != 1:
            self.buckets = bucket_sizes(self.image_size, self.bucket_step, self.max_ratio)

    def validate_counts(self) -> None:
        counts = ("image_size", "bucket_step", "batch_size", "shard_size", "max_text_length", "workers")
        require(
            self,
            *((name, getattr(self, name) >= 1, "at least 1") for name in counts),
            ("max_bad_examples", 0 <= self.max_bad_examples <= 1, "a share from 0 to 1"),
        )
        if self.seed < 0 or self.data.get("streaming"):
            raise ValueError("seed must be 0 or more, and data.streaming left out: what can be streamed always is.")
