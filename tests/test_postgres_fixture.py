"""Tests of the PostgreSQL server that other tests use."""

from typing import LiteralString

import psycopg
import pytest
from postgres import Server, create_database

pytestmark = pytest.mark.xdist_group("postgres")


def ask(url: str, statement: LiteralString) -> list[tuple[object, ...]]:
    with psycopg.connect(url, connect_timeout=5) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def test_two_databases_are_separate(postgres_server: Server) -> None:
    one, other = create_database(postgres_server, "one"), create_database(postgres_server, "other")
    ask(one, "CREATE TABLE cells (key text)")
    assert ask(one, "SELECT count(*) FROM cells") == [(0,)]
    with pytest.raises(psycopg.errors.UndefinedTable):
        ask(other, "SELECT count(*) FROM cells")


def test_a_database_of_a_known_name_is_new_though_someone_is_connected(postgres_server: Server) -> None:
    url = create_database(postgres_server, "again")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE cells (key text)")
        assert create_database(postgres_server, "again") == url
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(psycopg.errors.UndefinedTable):
        ask(url, "SELECT count(*) FROM cells")


def test_the_server_goes_away_and_comes_back_with_its_data(postgres_server: Server) -> None:
    url = create_database(postgres_server, "kept")
    ask(url, "CREATE TABLE cells AS SELECT 7 AS seed")
    postgres_server.stop()
    with pytest.raises(psycopg.OperationalError):
        ask(url, "SELECT 1")
    postgres_server.start()
    assert ask(url, "SELECT seed FROM cells") == [(7,)]
