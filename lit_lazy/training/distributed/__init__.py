"""Distributed training: process group, rank process, sharded parameters."""
