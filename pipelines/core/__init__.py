"""The base of every room: records, errors, the store, frames of data, processes."""
