"""Public data sets: what is known of them, getting one from a real server,
and telling whether a folder holds it.
"""

import hashlib
import json
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from msgspec.structs import replace

from broker_config.protocol.errors import EdgeNodeError, UsageError
from tests.support.file_server import serve
from tests.support.paths import SHARED_DATA
from tests.support.plants import draw, here
from trainer.data.dataset_download import fetch_dataset
from trainer.data.datasets import DATASETS
from trainer.data.datasets.dataset import Dataset, Images
from trainer.data.datasets.gc10_det import GC10_DET
from trainer.data.datasets.neu_cls import NEU_CLS
from trainer.data.datasets.x_sdd import X_SDD
from trainer.data.public_datasets import Comparison, compare_folder, compute_checksum, find_dataset


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the URL that it has on a server."""
    folder = tmp_path / "served"
    folder.mkdir()
    with serve(folder) as url:
        yield folder, url


def flat(images: Path, file: Path) -> Path:
    """A ZIP file as NEU-CLS comes: all images in two folders, called by class and number."""
    with zipfile.ZipFile(file, "w") as archive:
        for number, path in enumerate(sorted(images.glob("*/*.png"))):
            archive.write(
                path,
                f"{('train', 'valid')[number % 5 == 0]}/images/{path.parent.name}_{number}.png",
            )
        archive.writestr("train/labels/patches_1.txt", "0 0.5 0.5 1 1")
        archive.writestr("__MACOSX/train/images/._patches_1.png", b"no image")
    return file


@pytest.fixture
def toy(tmp_path: Path, served: tuple[Path, str]) -> Dataset:
    """A data set of three small classes that the server has as toy.zip."""
    folder, url = served
    images = draw(tmp_path / "original", 4, seed=1, size=8)
    archive = flat(images, folder / "toy.zip")
    classes: dict[str, Images | None] = {
        each.name: Images(
            4,
            compute_checksum(
                hashlib.sha256(path.read_bytes()).hexdigest() for path in each.iterdir()
            ),
        )
        for each in images.iterdir()
    }
    return replace(
        NEU_CLS,
        name="toy",
        archive=f"{url}/toy.zip",
        md5=hashlib.md5(archive.read_bytes()).hexdigest(),  # noqa: S324
        classes=classes,
        aliases={},
    )


def get(dataset: Dataset, out: Path, origin: object = "") -> Comparison:
    return fetch_dataset(dataset, str(origin), out, lambda chunks, _: chunks)


def left(folder: Path) -> list[str]:
    """What lies in a folder, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


# What is known


@pytest.mark.parametrize("dataset", DATASETS.values(), ids=list(DATASETS))
def test_a_data_set_names_its_licence_its_paper_and_where_it_is(dataset: Dataset) -> None:
    assert all((dataset.title, dataset.licence, dataset.citation))
    assert all(url.startswith(("http://", "https://")) for url in (dataset.home, dataset.by_hand))
    for images in dataset.classes.values():
        assert images is None or len(images.checksum) == 64


@pytest.mark.parametrize(
    ("dataset", "path", "name"),
    [
        (NEU_CLS, "train/train/images/rolled-in_scale_7.jpg", "rolled-in_scale"),
        (NEU_CLS, "NEU-CLS/RS_12.bmp", "rolled-in_scale"),
        (NEU_CLS, "validation/images/pitted_surface/pitted_surface_241.jpg", "pitted_surface"),
        (NEU_CLS, "Pitted Surface/1.jpg", "pitted_surface"),
        (NEU_CLS, "train/images/example.jpg", None),
        (
            X_SDD,
            "X-SDD-A-New-benchmark-1/X-SDD/datas/finishing roll printing/6001.png",
            "finishing_roll_printing",
        ),
        (X_SDD, "X-SDD/figure.png", None),
        (GC10_DET, "images/10/img_01_425391800_00001.jpg", "waist_folding"),
        (GC10_DET, "1/img.jpg", "punching_hole"),
        (GC10_DET, "crescent_gap/img.jpg", "crescent_gap"),
        (GC10_DET, "lable/img_01.jpg", None),
    ],
)
def test_the_class_is_read_from_the_nearest_folder_or_the_name_before_the_number(
    dataset: Dataset, path: str, name: str | None
) -> None:
    assert dataset.class_of(PurePosixPath(path)) == name


def test_an_unknown_data_set_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="neu-clss") as caught:
        find_dataset("neu-clss")
    assert "did you mean 'neu-cls'?" in caught.value.remedy


# Getting one


def test_a_download_is_laid_out_as_class_folders_and_is_the_data_set_image_by_image(
    toy: Dataset, tmp_path: Path
) -> None:
    outcome = get(toy, tmp_path / "images")
    assert outcome.counts == {"inclusion": 4, "patches": 4, "scratches": 4}
    assert outcome.differences == []
    assert left(tmp_path / "images") == ["inclusion", "patches", "scratches"]
    assert {path.read_bytes() for path in (tmp_path / "images").glob("*/*")} == {
        path.read_bytes() for path in (tmp_path / "original").glob("*/*")
    }
    assert left(tmp_path) == ["images", "original", "served"]  # nothing half done beside it


def test_a_folder_or_file_or_url_that_the_user_brings_is_laid_out_and_compared(
    toy: Dataset, served: tuple[Path, str], tmp_path: Path
) -> None:
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(served[0] / "toy.zip").extractall(unpacked)
    for number, origin in enumerate((unpacked, served[0] / "toy.zip", f"{served[1]}/toy.zip")):
        outcome = get(toy, tmp_path / f"out-{number}", origin)
        assert (outcome.differences, outcome.left_out) == ([], 0)


def test_what_the_user_brings_may_differ_and_is_told(toy: Dataset, tmp_path: Path) -> None:
    mine = draw(tmp_path / "mine", 3, seed=2, size=8, classes=("patches", "inclusion", "rust"))
    outcome = get(toy, tmp_path / "out", mine)
    assert outcome.counts == {"inclusion": 3, "patches": 3}
    assert outcome.left_out == 3  # rust
    assert "scratches: the class is missing" in outcome.differences


def test_an_image_of_two_classes_is_left_out(tmp_path: Path) -> None:
    """GC10-DET's folders share a few: what shows two defects."""
    mine = draw(tmp_path / "mine", 3, seed=2, size=8, classes=("1", "2"))
    (mine / "2" / "both.png").write_bytes((mine / "1" / "2-0.png").read_bytes())
    outcome = get(GC10_DET, tmp_path / "out", mine)
    assert outcome.counts == {"punching_hole": 2, "welding_line": 3}
    assert outcome.left_out == 2


def test_images_of_the_same_name_in_two_folders_are_both_kept(toy: Dataset, tmp_path: Path) -> None:
    for side, seed in (("train", 1), ("valid", 2)):
        draw(tmp_path / "mine" / side, 3, seed, size=8, classes=("patches",))
    for path in (tmp_path / "mine" / "valid" / "patches").iterdir():
        path.rename(path.with_name(path.name.replace("2-", "1-")))
    outcome = get(toy, tmp_path / "out", tmp_path / "mine")
    assert outcome.counts == {"patches": 6}


# When it goes wrong, nothing stays


def refused(dataset: Dataset, tmp_path: Path, origin: str = "") -> EdgeNodeError:
    before = left(tmp_path)
    with pytest.raises(EdgeNodeError) as caught:
        get(dataset, tmp_path / "images", origin)
    assert left(tmp_path) == before
    assert caught.value.remedy
    return caught.value


def test_a_file_of_another_checksum_is_refused(toy: Dataset, tmp_path: Path) -> None:
    error = refused(replace(toy, md5="0" * 32), tmp_path)
    assert f"its MD5 is {toy.md5}, not {'0' * 32}" in error.what


def test_images_that_are_not_the_data_sets_are_refused(toy: Dataset, tmp_path: Path) -> None:
    changed = replace(
        toy,
        classes={**toy.classes, "patches": Images(4, "0" * 64), "scratches": Images(6, "0" * 64)},
    )
    error = refused(changed, tmp_path)
    assert "patches: 4 images" in error.what
    assert "scratches: 2 image(s) missing" in error.what


def test_a_download_that_is_cut_short_is_refused(
    toy: Dataset, served: tuple[Path, str], tmp_path: Path
) -> None:
    total = (served[0] / "toy.zip").stat().st_size
    error = refused(replace(toy, archive=f"{served[1]}/cut/toy.zip"), tmp_path)
    assert f"ended after {total // 2:,} of {total:,} bytes" in error.what


def test_a_server_that_is_not_there_is_named_with_what_to_do_by_hand(
    toy: Dataset, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/toy.zip"
        error = refused(replace(toy, archive=url), tmp_path)
    assert f"{url} cannot be downloaded" in error.what
    assert toy.by_hand in error.remedy
    assert "edge-node dataset toy --from FILE --out FOLDER" in error.remedy


def test_a_file_that_the_server_does_not_have_is_refused(
    toy: Dataset, served: tuple[Path, str], tmp_path: Path
) -> None:
    assert "HTTP Error 404" in refused(replace(toy, archive=f"{served[1]}/none.zip"), tmp_path).what


@pytest.mark.parametrize("content", [b"<html>please log in</html>", b""])
def test_what_is_no_zip_file_is_refused(content: bytes, toy: Dataset, tmp_path: Path) -> None:
    (tmp_path / "page.zip").write_bytes(content)
    assert "not a whole ZIP" in refused(toy, tmp_path, str(tmp_path / "page.zip")).what


def test_a_zip_file_with_a_damaged_image_is_refused(
    toy: Dataset, served: tuple[Path, str], tmp_path: Path
) -> None:
    content = bytearray((served[0] / "toy.zip").read_bytes())
    content[100] ^= 0xFF  # inside the first image, which is stored as it is
    (tmp_path / "bad.zip").write_bytes(content)
    assert "Bad CRC-32" in refused(toy, tmp_path, str(tmp_path / "bad.zip")).what


def test_an_archive_cannot_write_outside_the_folder(toy: Dataset, tmp_path: Path) -> None:
    image = next((tmp_path / "original" / "patches").iterdir()).read_bytes()
    names = (
        "../../escaped/patches/1.png",
        "/escaped/patches_2.png",
        "patches/../../../escaped_3.png",
    )
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        for number, name in enumerate(names):
            archive.writestr(name, image + bytes([number]))
    (tmp_path / "deep").mkdir()
    before = left(tmp_path)
    get(toy, tmp_path / "deep" / "out", tmp_path / "evil.zip")
    assert left(tmp_path) == before
    assert left(tmp_path / "deep") == ["out"]
    assert left(tmp_path / "deep" / "out") == ["patches"]
    assert left(tmp_path / "deep" / "out" / "patches") == [
        "1.png",
        "escaped_3.png",
        "patches_2.png",
    ]


def test_no_images_of_the_data_set_are_named_with_its_classes(toy: Dataset, tmp_path: Path) -> None:
    mine = draw(tmp_path / "mine", 1, seed=2, size=8, classes=("cats", "dogs"))
    error = refused(toy, tmp_path, str(mine))
    assert "no images of toy" in error.what
    assert "patches" in error.remedy


def test_a_folder_with_something_in_it_is_left_as_it_is(toy: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="empty folder"):
        get(toy, tmp_path / "original")
    assert left(tmp_path / "original") == ["inclusion", "patches", "scratches"]


def test_a_data_set_behind_a_login_says_how_to_get_it_by_hand(tmp_path: Path) -> None:
    error = refused(GC10_DET, tmp_path)
    assert GC10_DET.by_hand in error.remedy


# Verifying


def test_a_copy_is_the_data_set_under_any_file_names_and_with_copies(
    toy: Dataset, tmp_path: Path
) -> None:
    folder = tmp_path / "original"
    for number, path in enumerate(sorted(folder.glob("patches/*"))):
        path.rename(path.with_name(f"x{number}.png"))
    (folder / "patches" / "again.png").write_bytes((folder / "patches" / "x0.png").read_bytes())
    assert compare_folder(toy, folder).differences == []


def test_each_difference_is_named_with_its_class(toy: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "original"
    next((folder / "patches").iterdir()).unlink()
    changed = next((folder / "inclusion").iterdir())
    changed.write_bytes(changed.read_bytes() + b"!")
    (folder / "scratches").rename(folder / "scratch")
    (folder / "loose.png").write_bytes(b"?")
    told = "\n".join(compare_folder(toy, folder).differences)
    assert "patches: 1 image(s) missing" in told
    assert "inclusion: 4 images, but" in told
    assert "scratches: the class" in told
    assert "scratch: 4 image(s) too many" in told
    assert "loose.png" in told


@pytest.mark.parametrize(
    ("name", "folder", "number"), [("neu-cls", "neu_cls", 1799), ("x-sdd", "xsdd", 1351)]
)
def test_the_copies_that_we_know_are_verified(name: str, folder: str, number: int) -> None:
    if not (SHARED_DATA / folder).is_dir():
        pytest.skip("the images are not here")
    outcome = compare_folder(find_dataset(name), SHARED_DATA / folder)
    assert outcome.differences == []
    assert sum(outcome.counts.values()) == number


# The command


def test_the_command_lists_every_data_set_with_licence_paper_and_page() -> None:
    told = here("dataset").stdout
    for dataset in DATASETS.values():
        assert all(
            text in told
            for text in (dataset.name, dataset.licence, dataset.citation, dataset.by_hand)
        )
    assert [each["name"] for each in json.loads(here("dataset", "--json").stdout)] == list(DATASETS)


def test_the_command_shows_the_licence_gets_the_images_and_verifies_them(
    served: tuple[Path, str], tmp_path: Path
) -> None:
    images = draw(tmp_path / "original", 2, seed=1, size=8, classes=("1", "2"))
    with zipfile.ZipFile(served[0] / "gc10.zip", "w") as archive:
        for path in images.glob("*/*"):
            archive.write(path, path.relative_to(images))
    result = here(
        "dataset", "gc10-det", "--from", f"{served[1]}/gc10.zip", "--out", tmp_path / "out"
    )
    assert result.returncode == 0, result.stderr
    assert GC10_DET.licence in result.stderr
    assert "4 different images of 2 classes" in result.stdout
    assert left(tmp_path / "out") == ["punching_hole", "welding_line"]
    result = here("dataset", "gc10-det", "--verify", tmp_path / "out")
    assert result.returncode == 1
    assert "crease: the class is missing" in result.stdout
    told = json.loads(here("dataset", "gc10-det", "--verify", tmp_path / "out", "--json").stdout)
    assert (told["verified"], told["images"]) == (False, {"punching_hole": 2, "welding_line": 2})


@pytest.mark.parametrize("flags", [("--from", "x.zip"), ("--out", "a", "--verify", "b")])
def test_options_that_do_not_go_together_are_refused(flags: tuple[str, ...]) -> None:
    result = here("dataset", "neu-cls", *flags)
    assert result.returncode == 2
    assert "pass one of them" in result.stderr
