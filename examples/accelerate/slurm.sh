#!/bin/bash
# sbatch examples/accelerate/slurm.sh FILE.yaml [--field value ...]
# SHARDED=1 sbatch --export=ALL examples/accelerate/slurm.sh FILE.yaml [--field value ...]
# PROGRAM="python -m hf_ext_cli.main" sbatch --export=ALL examples/accelerate/slurm.sh sample MODEL ...
# A job of two nodes with eight GPUs each that SLURM may stop at any time: 120 s before the end SLURM signals every
# process; the run saves within a step and ends with 75, and the job is queued again. It goes on bit for bit.
# Each process has all weights (DDP); with SHARDED=1 a sixteenth of them (FSDP2), and goes on on any number of processes.
# PROGRAM is any other command that processes share, such as sampling: the signal ends it at once, and it goes on too.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# Every process sees all GPUs of its node and takes the one of its number there. (With --gpus-per-task each would see one,
# which is number 0 for all of them.) The output_dir must lie on a disk that all nodes share.
export MASTER_ADDR MASTER_PORT WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A port that is free on that node now: jobs of others may have taken the usual one.
MASTER_PORT=$(srun --nodes=1 --ntasks=1 --nodelist="$MASTER_ADDR" python -c \
  'import socket; place = socket.socket(); place.bind(("", 0)); print(place.getsockname()[1])')

# What accelerate's launcher would make of fsdp2.yaml.
if [ -n "$SHARDED" ]; then
  export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP
  export FSDP_RESHARD_AFTER_FORWARD=true FSDP_CPU_RAM_EFFICIENT_LOADING=false FSDP_STATE_DICT_TYPE=SHARDED_STATE_DICT
fi

# Without a launcher between SLURM and the training: a launcher would be ended by the signal first. Who fails ends alone;
# the others end by themselves, or after ten minutes by SLURM.
srun --kill-on-bad-exit=0 --wait=600 bash -c \
  "RANK=\$SLURM_PROCID LOCAL_RANK=\$SLURM_LOCALID exec ${PROGRAM:-python -m hf_ext.training} \"\$@\"" train "$@"
code=$?
# 138: ended by the signal.
[ $code -eq 75 ] || [ $code -eq 138 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
