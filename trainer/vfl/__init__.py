"""DAO-VFL: sensors, each seeing other features of the same products, learn one model together, online."""
