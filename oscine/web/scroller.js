// Keeps the newest text in sight, unless the person has scrolled up to read.

const NEAR_PX = 48;

export class Scroller {
  constructor(area, button) {
    this.area = area;
    this.button = button;
    this.atEnd = true;
    area.addEventListener("scroll", () => this.#look(), { passive: true });
    button.addEventListener("click", () => this.toEnd());
  }

  #look() {
    this.atEnd = this.area.scrollHeight - this.area.scrollTop - this.area.clientHeight < NEAR_PX;
    this.button.hidden = this.atEnd;
  }

  /** After text was added. */
  follow() {
    if (this.atEnd) this.area.scrollTop = this.area.scrollHeight;
    else this.#look();
  }

  toEnd() {
    this.area.scrollTop = this.area.scrollHeight;
    this.#look();
  }
}
