"""Outputs that follow a grammar: compiled and followed by xgrammar in a process of its own.

A regular expression of twenty characters can keep xgrammar busy for minutes, and nothing interrupts
it there. In a process of its own it has a deadline: who wrote the grammar gets an error, the engine
and all other requests go on.

    caller's thread --- compile(spec) ------> main thread: compiles, caches
    engine's thread --- masks(sequences) ---> follower: tokens in, a bit for each that may come

The process is a cache: what it does not know any more it is told again, from the beginning.
"""
