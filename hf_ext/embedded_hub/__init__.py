"""The Hub that `hf-ext hub serve` runs on one machine: for the quickstart, the tests and air-gapped laboratories."""
