"""How weights get in and out of one rank's parameters, in place and by the slots of one table.

``table`` has every slot of every checkpoint tensor and checks that it is whole, ``load`` streams
tensors into it, ``slots`` and ``quantized`` read and write single ones, changed cells alone
(``cell_patches``) too; aliases are compared, what was overwritten is noted (``patch_journal``), and
an equal rank's memory is taken as it is (``raw_load``). It knows of no layer, model or config.
"""
