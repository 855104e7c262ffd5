"""Command line of hf-ext, installed as hf_ext_cli so that --help imports neither hf_ext nor torch."""
