"""Weights of a compiled method: bound to the user's model (`binder`) or read from a checkpoint (`from_checkpoint`).

`checkpoint` reads files in parts, `pieces` finds out which parts the weight plan needs, `filling` carries the plan out
on them, `loaded` holds the result; `devices` says where weights are in this process. `kept` keeps results of the plan
on disk, in the files of `tensors_file`.
"""
