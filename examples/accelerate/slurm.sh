#!/bin/bash
# sbatch examples/accelerate/slurm.sh FILE.yaml [--field value ...]
# A job of two nodes with four GPUs each that SLURM may stop at any time: 120 s before the end SLURM signals every
# process; the run saves within a step and ends with 75, and the job is queued again. It goes on bit for bit.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

export MASTER_ADDR MASTER_PORT=29500 WORLD_SIZE=$SLURM_NTASKS
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Without a launcher between SLURM and the training: a launcher would be ended by the signal first.
srun --kill-on-bad-exit=0 bash -c \
  'RANK=$SLURM_PROCID LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=$SLURM_LOCALID exec python -m hf_ext.training "$@"' train "$@"
code=$?
[ $code -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
