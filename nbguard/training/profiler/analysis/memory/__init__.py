"""A fit's memory: categories at the peak, growth, holders."""
