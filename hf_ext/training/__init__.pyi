from .arguments import DataArguments as DataArguments, DataSource as DataSource, TrainingArguments as TrainingArguments
from .callbacks import Callback as Callback
from .evaluation import evaluate as evaluate
from .launch import evaluate_checkpoint as evaluate_checkpoint, main as main
from .loop import train as train
from .methods import build_task as build_task
from .task import Task as Task
