"""Figures of the course: drawings, steppers and calculators, made from live objects and real traces."""
