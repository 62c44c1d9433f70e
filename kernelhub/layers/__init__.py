"""Layers of a live model: find them, check that a kernel fits, bind it in place, restore exactly, report.

Read in this order: ``marker`` and ``discovery`` (with ``names`` and ``structure``), ``contract`` (with ``signature``
and ``attribute``), ``binding``, ``decision``, ``kernelize``, ``report``.
"""
