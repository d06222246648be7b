"""DAO-VFL: sensors of one line, each seeing other features of the same products, learn one model together, online."""
