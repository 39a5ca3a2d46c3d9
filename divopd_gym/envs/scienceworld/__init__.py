"""ScienceWorld: elementary-school science experiments in text, on simulators that many episodes share."""
