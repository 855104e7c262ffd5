"""Folders of sound files. A file of its own: `datasets` replaces `Path` and `open` in that of each builder."""

import datasets
from datasets.packaged_modules.audiofolder.audiofolder import AudioFolder


class RecordingFolder(AudioFolder):
    """A folder of sound files whose column holds the files, not what a decoder makes of them."""

    # The type Audio of datasets asks for torchcodec and FFmpeg even to note the name of a file. The type Image without
    # decoding keeps the same pair of bytes and path; splits, labels from the names of folders and metadata.csv are
    # the builder's. The tasks decode with soundfile.
    def _base_feature(self) -> datasets.Image:
        return datasets.Image(decode=False)

    BASE_FEATURE = datasets.Image
