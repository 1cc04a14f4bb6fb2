"""Fits as copies without data, of a fastai Learner, a step function, Transformers' Trainer, a Lightning module."""
