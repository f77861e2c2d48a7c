"""Measures a daemon through its public door, and what it leaves behind."""
