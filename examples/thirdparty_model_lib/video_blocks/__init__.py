"""A small video model for several ranks: context-parallel attention, and one expert a rank."""
