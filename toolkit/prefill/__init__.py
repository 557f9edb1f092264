"""The engine: real multi-bucket capture of prefill graphs, written once over the Device/Graph seam."""
