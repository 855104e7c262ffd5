"""Peak memory of a merge: bounded, and the same for few and many tasks and for a larger model."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Every merge is a fork of one process that has imported all, and tells by how much its resident memory grew at most.
MEASURE = """
    import json, os, resource, struct, sys
    from pathlib import Path
    from hf_ext.emr import arithmetic
    from hf_ext.merging.merge import merge_checkpoints
    import hf_ext.hub.cards, hf_ext.merging.publishing

    place = Path(sys.argv[1])

    def checkpoint(name, rows):
        # zeros that take no room on the disk
        header = json.dumps({"w": {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [0, rows * 4096]}}).encode()
        folder = place / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
        with open(folder / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + rows * 4096)
        return str(folder)

    def grown(tasks, rows, **options):
        base = checkpoint(f"base{rows}", rows)
        named = {f"t{index}": checkpoint(f"t{rows}-{index}", rows) for index in range(tasks)}
        reading, writing = os.pipe()
        if not os.fork():
            try:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                config = {"base": base, "tasks": named, "workers": 2} | options
                merge_checkpoints(config, place / f"merged-{tasks}-{rows}", progress=False, overwrite=True)
                os.write(writing, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before).encode())
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writing)
        os.wait()
        return int(os.read(reading, 100)) / 1024

    arithmetic.find_kernels("cpu")
    cases = json.loads(sys.argv[2])
    print(json.dumps({key: grown(tasks, rows, **options) for key, tasks, rows, options in cases}))
"""


@pytest.mark.slow
def test_peak_memory_depends_neither_on_the_number_of_tasks_nor_on_the_size_of_the_model(tmp_path):
    # 8 MB a checkpoint, ten times that, and 2 GB
    cases = [("two", 2, 2048, {}), ("eight", 8, 2048, {}), ("thirty", 30, 2048, {}), ("large", 2, 20480, {})]
    cases += [("little", 8, 2048, {"memory": "1MB"}), ("huge", 2, 2**19, {"max_shard_size": "500MB"})]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path), json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    # MB by which the resident memory grew
    found: dict[str, float] = json.loads(done.stdout)
    assert found.pop("little") < found["eight"] + 5, found
    for name in found:
        assert abs(found[name] / found["eight"] - 1) < 0.1, found
