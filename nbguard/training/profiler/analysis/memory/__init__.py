"""A fit's memory, with categories at the peak, growth, holders."""
