"""Words that name a split in folders, files and cells."""

from datasets.data_files import SPLIT_KEYWORDS

# The split that a word means, as `datasets` has it.
SPLIT_WORDS = {word: str(kind) for kind, words in SPLIT_KEYWORDS.items() for word in words}
