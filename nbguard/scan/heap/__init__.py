"""The walk over Python's heap from every root: kinds of objects, their references, and what no root reaches."""
