"""What every room stands on: records, errors, the store, frames of data, processes."""
