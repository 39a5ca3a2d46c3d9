"""Asynchronous on-policy distillation of language-model agents on the environments of `divopd_gym`."""
