#!/bin/bash
mkdir island && touch island/office.txt
