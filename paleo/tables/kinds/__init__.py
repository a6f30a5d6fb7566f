"""Kinds of measured tables, one module for each; a CSV file's column names decide to which kind the file belongs."""
