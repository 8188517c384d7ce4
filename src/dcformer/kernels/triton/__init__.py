"""The kernels of composed attention, one file per group: `products`, `key_side`, `compose`, `backward`.

They share `heads`, which is what composition does with all heads of one key, and `precision`. `launch` runs them.

A map holds one number for each key, query and head: [B, H, S, T], so that a key's queries are neighbours. Names in all
files: i_ index, o_ offset, m_ mask, p_ pointer, b_ block; t queries, s keys, h heads, d channels of a head.
"""
