"""Folders of sound files, in a separate module because `datasets` patches `Path` and `open` in the module of a
builder."""

import datasets
from datasets.packaged_modules.audiofolder.audiofolder import AudioFolder

from .sound_files import AUDIO_SUFFIXES


class RecordingFolder(AudioFolder):
    """Builder for a folder of sound files, whose column contains undecoded files."""

    # The type Audio of datasets asks for torchcodec and FFmpeg even to note the name of a file. The type Image without
    # decoding keeps the same pair of bytes and path; splits, labels from the names of folders and metadata.csv are
    # the builder's. The tasks decode with soundfile.
    def _base_feature(self) -> datasets.Image:
        return datasets.Image(decode=False)

    BASE_FEATURE = datasets.Image
    EXTENSIONS = sorted({*AudioFolder.EXTENSIONS} | AUDIO_SUFFIXES)
