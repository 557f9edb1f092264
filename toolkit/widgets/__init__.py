"""The Lab: widgets in which a person picks, captures and sees. A testable state, and a thin view of it."""
