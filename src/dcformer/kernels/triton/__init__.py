"""The kernels of composed attention, one file per group: `products`, `key_side`, `compose`, `backward`, `scales`.

They share `heads`, which is what composition does with all heads of one key, and `precision`. `launch` runs them.

A map holds one number for each key, query and head: [B, S, tiles, H, queries of a tile], so that what a program needs
of a key is one piece of memory; see `Launcher._new_map`. Names in all files: i_ index, o_ offset, m_ mask, p_ pointer,
b_ block; t queries, s keys, h heads, d channels of a head.
"""
