"""Candidates in other programs' words, and back: Megatron flags, DeepSpeed JSON, torchtitan modules, launch files."""
