"""Entry point of `python -m hf_ext`, the same as `hf-ext`."""

import sys

if __name__ == "__main__":
    # Python has imported hf_ext to find this file, without its models (hf_ext/__init__.py says how). The command
    # decides for itself, as it imports hf_ext, whether it needs them: so it has to find nothing imported.
    del sys.modules["hf_ext"]
    from hf_ext_cli.main import main

    main(prog_name="hf-ext")
