"""All that makes SemanIR faster: importing this enters it in the tables of `hf_ext.semanir`."""

from . import semanir_operators, semanir_strips

__all__ = ["semanir_operators", "semanir_strips"]
