"""Layers of a live model: find them, check that a kernel fits, bind it in place, restore exactly, report.

Read in this order: ``marker`` and ``discovery`` (with ``names`` and ``structure``), ``contract`` (with ``signature``
and ``attribute``), ``decision`` and ``decider`` (with ``outcome``, ``fitting``, ``device``), ``binding`` and ``binder``
(with ``choosing``), ``kernelize``, ``report``. Kernels with parameters of their own: ``companion``, ``conversion``,
``layout``, ``joint``, ``fusing``. Attention functions: ``attention``.
"""
