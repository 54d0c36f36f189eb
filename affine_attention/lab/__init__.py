"""Data, distillation, evaluation, inspection and the report. The stages exchange data through the run folder."""
