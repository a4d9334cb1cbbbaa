"""Tests of the PTX simulator, written from the PTX ISA: every expectation comes from a formula of its own."""
