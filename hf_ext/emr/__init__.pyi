from .model import EMRModel as EMRModel
