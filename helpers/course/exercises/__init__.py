"""The checks of the exercises, one module a lesson; `checking.py` compares an answer with the right one."""
