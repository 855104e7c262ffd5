"""Faster implementations of operations of the models. They stay with the package: nothing here travels with a model.

Each method's files register themselves with the method's operators, and those call them where they fit.
"""
