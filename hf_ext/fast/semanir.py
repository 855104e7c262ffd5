"""Faster operations of SemanIR, registered in the tables of `hf_ext.semanir` on import."""

from . import semanir_operators, semanir_strips

__all__ = ["semanir_operators", "semanir_strips"]
