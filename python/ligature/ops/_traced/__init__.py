"""Calls as torch's tools see them: in compiled and exported graphs (``calls``, of a fuser that
``group`` describes, with ``shapes``), under modes (``watched``), and what ``flops`` they count."""
